"""Settings that a model can't be combined with are refused before a process starts."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image
from trust import trust

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.rl_columns import IMAGE_COLUMNS


@pytest.fixture(scope="module")
def overrides(make_vision_model, tmp_path_factory):
    folder, file = tmp_path_factory.mktemp("data"), io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    row = {
        "prompt": [{"role": "user", "content": "<image>"}],
        "data_source": "d",
        "reward_model": {"ground_truth": "a"},
        "images": ["data:image/png;base64," + base64.b64encode(file.getvalue()).decode()],
    }
    (folder / "a.jsonl").write_text(json.dumps(row) + "\n")
    return (
        f"model.path={make_vision_model()}",
        f"data.train_files={folder / 'a.jsonl'}",
        f"data.val_files={folder / 'a.jsonl'}",
        f"model.cache_dir={folder}",
        "rollout.response_length=4",
    )


def check(*overrides):
    facts = Facts(load_config(list(overrides)), PluginPolicy())
    preflight(facts)
    return facts.graph


def test_only_the_models_of_a_step_read_pixels(overrides):
    graph = check(*overrides)
    seeing = {stage.name for stage in graph.stages if set(IMAGE_COLUMNS) <= set(stage.reads)}
    assert seeing == {"log_prob_gap", "old_log_prob", "ref", "update_actor"}
    assert {name for stage in graph.stages for name in stage.reads} & set(IMAGE_COLUMNS) == set(IMAGE_COLUMNS)
    assert set(IMAGE_COLUMNS) <= set(graph["rollout"].writes)
    assert "reward" not in seeing
    both = check(*overrides, "algorithm=ppo", "data.train_batch_size=64")
    assert all(set(IMAGE_COLUMNS) <= set(both[name].reads) for name in ("values", "update_critic"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.name=vllm", "rollout.name must be hf; got vllm"),
        ("model_engine=megatron", "model_engine must be torch or fsdp; got megatron"),
        ("actor.use_remove_padding=true", "actor.use_remove_padding must be False; got True"),
    ],
)
def test_what_it_is_not_combined_with(overrides, setting, message):
    with pytest.raises(ConfigError, match=rf"sees images, for which {message}"):
        check(*overrides, setting)


@pytest.mark.parametrize("key", ["actor.use_remove_padding", "critic.use_remove_padding"])
def test_joining_sequences_of_an_untested_family_is_refused(overrides, key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "max_position_embeddings": 128}))
    (tmp_path / "model.safetensors").touch()
    given = ("algorithm=ppo", "data.train_batch_size=64", *overrides, f"model.path={tmp_path}", f"{key}=true")
    with pytest.raises(ConfigError, match=rf"has model_type='bloom', .* not tested; {key} must be False, got True"):
        check(*given)


def test_a_reward_model_would_not_see_them(overrides, tmp_path):
    (tmp_path / "judge.toml").write_text('kind = "model"\npath = "' + str(tmp_path) + '"\n')
    (tmp_path / "config.json").write_text("{}")
    trust(tmp_path / "judge.toml")
    with pytest.raises(ConfigError, match=r"sees images, which the reward model .*judge\.toml would not"):
        check(*overrides, f"reward.function={tmp_path / 'judge.toml'}")


def test_the_context_is_that_of_the_part_that_reads_text(overrides):
    with pytest.raises(ConfigError, match="do not fit the model's context of 128"):
        check(*overrides, "rollout.response_length=124")


def test_modules_that_get_no_adapters_are_named(moe_model):
    demo = (f"model.path={moe_model}", "lora.rank=4")
    attention = "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
    with pytest.raises(
        ConfigError,
        match=r"names gate_proj, up_proj, down_proj, of experts.*Set lora.target_modules=\[q_proj,k_proj,v_proj,o_proj\]",
    ):
        check(*demo)
    check(*demo, attention)
    with pytest.raises(ConfigError, match=r"lora.target_modules names down_proj.*Set lora.rank=0"):
        check(*demo, "lora.target_modules=[down_proj]")
