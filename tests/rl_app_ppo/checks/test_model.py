"""Settings that a model can't be combined with are refused before a process starts."""

from __future__ import annotations

import base64
import io
import json
import shutil

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


def test_megatron_trains_no_model_that_sees(overrides):
    with pytest.raises(ConfigError, match=r"sees images, for which model_engine must be torch or fsdp; got megatron"):
        check(*overrides, "model_engine=megatron")


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


def test_a_teacher_of_another_size_sees_what_the_policy_sees(overrides, make_vision_model, base_model, tmp_path):
    teacher = make_vision_model("qwen2_5_vl", hidden=64)
    check(*overrides, f"reference.path={teacher}")
    other = shutil.copytree(teacher, tmp_path / "other")
    processor = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(processor | {"patch_size": 8}))
    with pytest.raises(ConfigError, match=r"reads images with patch_size=8, and the policy, .* with 4; set a model"):
        check(*overrides, f"reference.path={other}")
    with pytest.raises(
        ConfigError, match="reads only text, and the policy images too; set a model that reads the same"
    ):
        check(*overrides, f"reference.path={base_model}")


def test_the_context_is_that_of_the_part_that_reads_text(overrides):
    with pytest.raises(ConfigError, match="do not fit the model's context of 128"):
        check(*overrides, "rollout.response_length=124")


def test_modules_that_get_no_adapters_are_named(moe_model, tmp_path):
    demo = (f"model.path={moe_model}", "lora.rank=4")
    attention = "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
    check(*demo)
    check(*demo, "model_engine=fsdp")
    check(*demo, "model_engine=megatron")
    for setting, reason in (
        (
            "torch.param_dtype=bfloat16",
            "whose adapters need torch.param_dtype=float32, or another model_engine; got bfloat16",
        ),
        ("lora.dropout=0.1", "for which peft says: lora.ParamWrapper does not work with lora_dropout != 0"),
        ("lora.use_dora=true", "for which peft says: lora.ParamWrapper does not work with use_dora=True"),
    ):
        wanted = (
            rf"names gate_proj, up_proj, down_proj, of experts, {reason}\. Set lora.target_modules=\[q_proj,k_proj,"
        )
        with pytest.raises(ConfigError, match=wanted):
            check(*demo, setting)
        check(*demo, setting, attention)
    with pytest.raises(ConfigError, match=r"lora.target_modules names down_proj.*Set lora.rank=0"):
        check(*demo, "model_engine=megatron", "lora.target_modules=[down_proj]", "lora.use_dora=true")
    check(*demo, "model_engine=fsdp", "fsdp.param_dtype=bfloat16")
    for part in ("lora.target_modules=[q_proj,up_proj]", "lora.exclude=[layers.0.mlp.experts.up_proj]"):
        with pytest.raises(
            ConfigError, match=r"lora.target_modules and lora.exclude must take all of gate_proj, up_proj"
        ):
            check(*demo, part)
    check(*demo, "lora.exclude=[layers.0.mlp.experts.down_proj]")


def test_router_replay_needs_a_model_with_experts_and_engines_that_have_it(moe_model, tmp_path):
    check(f"model.path={moe_model}", "algorithm.router_replay=R3")
    for engine in ("fsdp", "megatron"):
        check(f"model.path={moe_model}", "algorithm.router_replay=R2", f"model_engine={engine}")
    with pytest.raises(
        ConfigError, match=r"algorithm\.router_replay=R3 needs a model with experts, .* got the demo model"
    ):
        check("algorithm.router_replay=R3")
    described = json.loads((moe_model / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    for file in moe_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"of model_type mixtral, .*; got model\.path=.* of model_type='deepseek_v3'"):
        check(
            f"model.path={tmp_path}",
            "algorithm.router_replay=R2",
            "actor.use_remove_padding=false",
        )


def test_models_and_layouts_that_megatron_core_can_not_train_are_refused_with_the_key(moe_model, tmp_path):
    given = ("model_engine=megatron", "actor.use_kl_loss=false")
    two = "megatron.expert_model_parallel_size=2"
    check(f"model.path={moe_model}", *given, two)
    for settings, message in (
        (["megatron.expert_model_parallel_size=3"], r"experts=4 .* expert=3 .*megatron\.expert_model_parallel_size\."),
        (["megatron.tensor_model_parallel_size=2"], r"needs sequence_parallel=True.*megatron\.sequence_parallel\."),
        ([two, "megatron.distributed_optimizer=true"], r"megatron\.distributed_optimizer must be false with"),
        ([two, "megatron.world_size=3"], r"0 or a multiple of tensor \* pipeline \* expert \(2\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(f"model.path={moe_model}", *given, *settings)
    described = json.loads((moe_model / "config.json").read_text()) | {"decoder_sparse_step": 2}
    for file in moe_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"model_engine=megatron can't train .* decoder_sparse_step must be 1; got 2"):
        check(f"model.path={tmp_path}", *given)
