"""One configuration for all engines: one LoRA block, no lost overrides, no diverging defaults.

PR #5848 of verl left these open. `--explain` and `--diff` are tested here too.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from golden import NEEDS

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.memory import check_memory, needed_bytes, parameters
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cli.explain import difference, explain, read_side
from rl_app_ppo.cli.main import main
from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.loading import flat_settings, load_config, options, resolve, shown_yaml, to_yaml
from rl_app_ppo.config.placement import worker_groups
from rl_app_ppo.config.rollout_engines import room_for_adapters
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS, TrainingBackendSpec
from rl_app_ppo.config.verl_keys.aliases import SPELLINGS, VALUES
from rl_app_ppo.driver.workers import cpus_used
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import resolve_key
from rl_trainer.config.backends import MegatronConfig, TorchConfig

GOLDEN = Path(__file__).parents[1] / "golden"


# -- engines and their defaults
@pytest.mark.parametrize("engine", TRAINING_BACKENDS)
def test_the_resolved_configuration_of_each_engine_is_the_committed_one(engine):
    """A changed default changes user runs.

    To accept it, run `just golden` and add a line to the changelog.
    """
    config = load_config([f"model_engine={engine}", *NEEDS.get(engine, [])])
    assert to_yaml(config) == (GOLDEN / f"{engine}.yaml").read_text()


@pytest.mark.parametrize("engine", TRAINING_BACKENDS)
@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_an_engine_changes_its_own_defaults_and_nothing_else(engine, preset):
    """In verl each engine has its own YAML file, and the defaults of the same key differ."""
    plain, other = (
        resolve([f"algorithm={preset}", "placement=separate", f"model_engine={name}"]) for name in ("torch", engine)
    )
    differ = {key for key, setting in other.settings.items() if setting.value != plain.settings[key].value}
    own, of_torch = (TRAINING_BACKENDS[name].defaults for name in (engine, "torch"))
    own = {f"{group}.{name}" for group in ("actor", "critic") for name, _ in own.items() ^ of_torch.items()}
    assert differ - {"model_engine"} == own


@pytest.mark.parametrize(
    "defaults",
    [{"alpha": 32.0}, {"target_modules": "linear_qkv"}, {"optim.lr": 1e-6}, {"ppo_epochs": 5}],
)
def test_defaults_that_drift_apart_between_engines_cannot_be_written_down(defaults):
    """verl's defaults: alpha 32, linear_qkv for megatron; alpha 16, all-linear for fsdp."""
    with pytest.raises(ConfigError, match="which means the same with every backend"):
        TrainingBackendSpec(name="megatron", help="", options=TorchConfig, build="", defaults=defaults)


def test_the_engine_yields_to_preset_file_and_override(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("actor: {use_remove_padding: false}\nmodel_engine: fsdp\n")
    assert load_config(["model_engine=fsdp"]).actor.use_remove_padding
    assert not load_config([], file).actor.use_remove_padding
    assert load_config(["actor.use_remove_padding=true"], file).actor.use_remove_padding


def test_an_engine_that_is_not_there_is_refused():
    there = ", ".join(TRAINING_BACKENDS)
    with pytest.raises(ConfigError, match=rf"model_engine must be one of {there}; got 'fsdp2'\. Did you mean 'fsdp'\?"):
        load_config(["model_engine=fsdp2"])


@pytest.mark.parametrize("engine", TRAINING_BACKENDS)
def test_what_is_shown_has_no_group_of_another_engine(engine, tmp_path):
    config = load_config([f"model_engine={engine}", *NEEDS.get(engine, [])])
    shown = flat_settings(to_yaml(config))
    assert list(shown) == [option.key for option in options(engine)]
    assert {key.partition(".")[0] for key in shown} & set(TRAINING_BACKENDS) == {engine}
    (tmp_path / "shown.yaml").write_text(to_yaml(config))
    assert load_config([], tmp_path / "shown.yaml") == config


def test_the_default_view_stays_small():
    assert len(flat_settings(shown_yaml(load_config()))) <= 160


def test_what_is_shown_has_no_default_that_nothing_reads(tmp_path):
    shown = flat_settings(shown_yaml(load_config()))
    assert {"async_rl.max_staleness", "critic.optim.lr"} <= shown.keys()  # the demo sets the latter
    assert "async_rl.depth" not in shown
    ahead = load_config(["async_rl.max_staleness=2", "lora.rank=4"])
    assert flat_settings(shown_yaml(ahead)).keys() >= {"async_rl.depth", "lora.alpha"}
    (tmp_path / "shown.yaml").write_text(shown_yaml(ahead))
    assert load_config([], tmp_path / "shown.yaml") == ahead


def test_every_engines_keys_are_known_and_explained_whichever_is_chosen():
    resolved = resolve(["model_engine=fsdp"])
    assert "megatron.world_size = 0   (default)" in explain("megatron.world_size", resolved)
    assert "fsdp.world_size = 1" in explain("fsdp", resolve([]))
    with pytest.raises(ConfigError, match=r"Did you mean 'megatron\.world_size'"):
        load_config(["megatron.wrld_size=2"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=ppo", "critic.use_remove_padding=true"], r"critic\.use_remove_padding=True has no effect"),
        (["lora.rank=8", "algorithm.adv_estimator=optimal_token_baseline"], "Set another estimator"),
        (["lora.rank=8", "actor.use_remove_padding=true"], r"actor\.use_remove_padding=True has no effect"),
        (["lora.rank=8", "fsdp.world_size=2"], r"nothing reads it without model_engine=fsdp"),
        (
            ["megatron.tensor_model_parallel_size=2", "megatron.world_size=3"],
            r"megatron\.world_size must be 0 or a multiple of tensor \* pipeline \* expert \(2\); got 3",
        ),
        (
            ["megatron.sequence_parallel=true"],
            r"sequence_parallel must be false where .*tensor_model_parallel_size is 1",
        ),
        (
            ["lora.rank=8", "megatron.world_size=400"],
            r"must be at least megatron\.world_size / rollout\.n \(400 / 8\)",
        ),
    ],
)
def test_what_megatron_can_not_do_is_refused_before_a_process_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["model_engine=megatron", *overrides])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # for Megatron-Core's import warnings
@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 3), (2, 1, 1)])
def test_ranks_that_get_the_same_rows_are_those_that_megatron_has_share_a_replica(tensor, pipeline, data):
    from megatron.core.parallel_state import RankGenerator

    shape = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    config = MegatronConfig(**shape, world_size=tensor * pipeline * data)
    order = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    ours = [[rank for rank in range(config.ranks) if config.replica(rank) == share] for share in range(data)]
    assert ours == order.get_ranks("tp-pp")


def test_without_a_number_of_processes_there_is_one_replica():
    four = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert four.ranks == 4
    config = load_config(["model_engine=megatron", "lora.rank=8", "megatron.tensor_model_parallel_size=2"])
    assert (config.ranks, config.replicas) == (2, (0, 0))
    assert load_config(["model_engine=fsdp", "fsdp.world_size=3"]).replicas == (0, 1, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.use_dora=true"], "serves no DoRA adapters"),
        (["lora.rank=600"], r"up to rank 512; got lora\.rank=600\. Set lora\.merge=true"),
    ],
)
def test_adapters_that_vllm_can_not_serve_are_to_be_merged(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["lora.rank=8", "rollout.name=vllm", *overrides])
    assert not load_config(["lora.rank=8", "rollout.name=vllm", *overrides, "lora.merge=true"]).sends_adapters


def test_vllm_makes_room_for_the_adapters_of_the_run():
    room = room_for_adapters(load_config(["lora.rank=12", "lora.alpha=24", "lora.target_modules=q_proj"]).lora)
    assert (room.rank, room.alpha, room.target_modules) == (16, 24.0, ("q_proj",))
    rooted = load_config(["lora.rank=16", "lora.alpha=8", "lora.use_rslora=true"]).lora
    assert room_for_adapters(rooted).alpha / 16 == 8 / 4


def test_vllms_processes_can_share_the_heads_of_the_model_and_get_a_cpu_each(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_engines, "require_vllm", lambda: SimpleNamespace(device="cpu"))

    def config(size, *more):
        return load_config(["rollout.name=vllm", f"rollout.tensor_model_parallel_size={size}", *more])

    preflight(Facts(config(2), PluginPolicy()))  # the demo's model has 4 heads
    with pytest.raises(ConfigError, match=r"4 attention heads .* 3 processes.*rollout\.tensor_model_parallel_size"):
        preflight(Facts(config(3), PluginPolicy()))
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(
        ConfigError, match=r"6 attention heads and 3 for keys and values, which can't be divided over 2 processes"
    ):
        preflight(Facts(config(2, f"model.path={tmp_path}"), PluginPolicy()))
    cpus = {group.roles: cpus_used(group, config(2)) for group in worker_groups(config(2))}
    assert cpus == {("actor",): 1, ("ref",): 1, ("rollout",): 2, ("reward",): 1}


# -- one LoRA block
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.lora_rank=8", "model.lora.rank=16"], ("model.lora_rank=8", "model.lora.rank=16")),
        (["lora.rank=8", "actor_rollout_ref.model.lora_rank=16"], ("lora.rank=8", "model.lora_rank=16")),
        (["lora.rank=8", "lora.alpha=32", "model.lora_alpha=16"], ("lora.alpha=32", "model.lora_alpha=16")),
        (["lora.rank=8", "lora.target_modules=q_proj", "model.target_modules=all-linear"], ("q_proj", "all-linear")),
    ],
)
def test_two_lora_schemas_that_disagree_are_refused_by_both_names(overrides, named):
    """verl reads lora_rank in one engine and lora.rank in the other.

    With the wrong one it trains without LoRA, or trains all weights.
    """
    with pytest.raises(ConfigError, match="are the same setting with different values") as caught:
        load_config(overrides)
    assert all(name in str(caught.value) for name in named)


def test_spellings_that_agree_are_the_same_setting(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref: {model: {lora_rank: 8, target_modules: [q_proj, v_proj]}}\n")
    config = load_config(["lora.rank=8", "model.lora.rank=8", "model.lora_alpha=16"], file)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets()) == (8, 16.0, ("q_proj", "v_proj"))
    with pytest.raises(ConfigError, match="are the same setting"):
        load_config(["lora.rank=4"], file)


# -- verl's bypass_mode
@pytest.mark.parametrize(("value", "ours"), [("true", "rollout"), ("false", "recompute")])
def test_bypass_mode_is_a_spelling_of_old_log_prob(value, ours):
    alias = f"algorithm.rollout_correction.bypass_mode={value}"
    assert load_config([alias]).algorithm.old_log_prob == ours
    assert load_config([alias, f"algorithm.old_log_prob={ours}"]).algorithm.old_log_prob == ours
    with pytest.raises(ConfigError, match=r"bypass_mode=\w+ and algorithm\.old_log_prob=auto are the same setting"):
        load_config([alias, "algorithm.old_log_prob=auto"])
    with pytest.raises(ConfigError, match="bypass_mode must be true or false; got 'perhaps'"):
        load_config(["algorithm.rollout_correction.bypass_mode=perhaps"])
    with pytest.raises(ConfigError, match=r"old_log_prob_tolerance=0\.1 has no effect"):
        load_config([alias, "algorithm.old_log_prob_tolerance=0.1"])


def test_every_spelling_is_of_a_key_there_is():
    ours = {option.key for option in options()}
    assert set(SPELLINGS.values()) <= ours
    assert not SPELLINGS.keys() & ours
    assert VALUES.keys() <= SPELLINGS.keys()


# -- asynchronous training in the words of others
@pytest.mark.parametrize(
    "alias",
    [
        "trainer.v1.sampler.max_off_policy_threshold",
        "grpo.async_grpo.max_trajectory_age_steps",
        "async_rl.sampler.max_staleness_versions",
        "rollout.max_head_offpolicyness",
    ],
)
def test_a_bound_in_versions_has_the_same_meaning_everywhere(alias):
    assert load_config([f"{alias}=3"]).async_rl.max_staleness == 3
    with pytest.raises(ConfigError, match=rf"{re.escape(alias)}=3 and async_rl\.max_staleness=2 are the same setting"):
        load_config([f"{alias}=3", "async_rl.max_staleness=2"])
    with pytest.raises(ConfigError, match=r"async_rl\.max_staleness must be at least 0; got -1"):
        load_config([f"{alias}=-1"])
    assert "async_rl.max_staleness" in explain(alias, resolve([]))


@pytest.mark.parametrize("alias", ["async_training.partial_rollout", "grpo.async_grpo.in_flight_weight_updates"])
def test_weights_in_flight_continue_responses(alias):
    given = "async_rl.max_staleness=1"
    assert load_config([given, f"{alias}=true"]).async_rl.on_update == "continue"
    assert load_config([given, f"{alias}=false"]).async_rl.on_update == "finish"
    with pytest.raises(ConfigError, match=rf"{re.escape(alias)} must be true or false; got 1"):
        load_config([given, f"{alias}=1"])


def test_the_order_of_groups_and_what_becomes_of_stale_ones_have_the_words_of_others():
    order, stale = "async_rl.sampler.name", "trainer.v1.sampler.max_off_policy_strategy"
    found = load_config(["async_rl.max_staleness=2", f"{order}=ready_first", f"{stale}=drop"]).async_rl
    assert (found.order, found.when_stale) == ("ready_first", "drop")
    with pytest.raises(ConfigError, match=r"async_rl\.sampler\.name must be in_order or ready_first; got 'windowed'"):
        load_config(["async_rl.max_staleness=2", f"{order}=windowed"])


def test_the_method_of_the_proximal_policy_is_a_spelling_of_old_log_prob():
    alias, given = "actor.prox_logp_method", "rollout.max_head_offpolicyness=4"
    assert load_config([given, f"{alias}=recompute"]).algorithm.old_log_prob == "recompute"
    config = load_config([given, f"{alias}=loglinear"])
    assert config.algorithm.old_log_prob == "interpolate"
    assert config.algorithm.rollout_correction.rollout_is == "token"
    with pytest.raises(ConfigError, match=r"actor\.prox_logp_method must be recompute or loglinear; got 'metrics'"):
        load_config([given, f"{alias}=metrics"])


# -- nothing is lost
@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.layer_name_map",
        "actor.megatron.override_transformer_config.recompute_granularity",
        "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router",
        "fsdp.virtual_pipeline_model_parallel_size",
    ],
)
def test_an_override_of_another_engine_is_refused_and_not_lost(key):
    """#5848 silently dropped three such settings for megatron users.

    They are layer_name_map, override_config.model_config and freeze_moe_router.
    """
    with pytest.raises(ConfigError, match=f"Unknown key '{key}'"):
        load_config([f"{key}=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fsdp.world_size=2"], r"fsdp\.world_size=2 has no effect: nothing reads it without model_engine=fsdp"),
        (["lora.alpha=16"], r"lora\.alpha=16\.0 has no effect: .* lora\.rank greater than 0"),
        (["model.lora_alpha=16"], r"lora\.alpha=16\.0 has no effect"),
        (["critic.optim.lr=1"], r"critic\.optim\.lr=1\.0 has no effect: .* algorithm\.adv_estimator=gae"),
        (["algorithm.lam=0.5"], r"algorithm\.lam=0\.5 has no effect"),
        (["algorithm.gamma=0.9"], r"gamma=0\.9 has no effect: .* algorithm\.adv_estimator=gae, reinforce_plus_plus or"),
        (
            ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"],
            r"norm_adv_by_std_in_grpo=False has",
        ),
        (
            ["actor.policy_loss.loss_mode=sapo", "actor.clip_ratio_low=0.1"],
            r"clip_ratio_low=0\.1 .*loss_mode=vanilla or",
        ),
        (["algorithm=sft", "actor.clip_ratio_low=0.1"], r"clip_ratio_low=0\.1 .* algorithm\.rl_coef greater than 0"),
        (
            ["algorithm=sft", "actor.policy_loss.loss_mode=gspo"],
            r"loss_mode=gspo has .* algorithm\.rl_coef greater than 0",
        ),
        (["algorithm=sft", "algorithm.adv_estimator=rloo"], r"adv_estimator=rloo .* algorithm\.rl_coef greater than 0"),
        (["algorithm=sft", "algorithm.gamma=0.9"], r"gamma=0\.9 has no effect"),
        (["algorithm=opd", "reference.path=x", "actor.kl_loss_type=k1"], r"kl_loss_type=k1 .* actor\.kl_loss_topk=0"),
        (["actor.use_kl_loss=false", "actor.kl_loss_coef=0.5"], r"actor\.kl_loss_coef=0\.5 has no effect"),
        (["algorithm.kl_ctrl.kl_coef=0.5"], r"algorithm\.use_kl_in_reward=true"),
        (["actor.tau_pos=2"], r"loss_mode=sapo"),
        (["rollout.tensor_model_parallel_size=2"], r"without rollout\.name=vllm"),
        (["algorithm.filter_groups.metric=score"], r"filter_groups\.enable=true"),
        (["reward.overlong.penalty_factor=2"], r"reward\.overlong\.buffer_len greater than 0"),
        (["model.path=x", "model.cache_dir=y"], r"model\.path empty"),
    ],
)
def test_a_value_that_nothing_reads_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_a_resolved_file_names_every_key_and_is_accepted(preset, tmp_path):
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(load_config([f"algorithm={preset}", "actor.optim.lr=1e-3"])))
    assert load_config([], file).actor.optim.lr == 1e-3


def test_every_need_is_about_keys_there_are():
    config = load_config()
    for option in options():
        for path, need in option.needs:
            for one in need.split(" or "):
                assert resolve_key(config, path, re.match(r"!?([\w.]+)", one)[1]), (option.key, one)


# -- cross-field checks
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model_engine=fsdp", "fsdp.world_size=400"],
            r"actor\.ppo_mini_batch_size must be at least fsdp\.world_size / rollout\.n \(400 / 8\)",
        ),
        (
            ["model_engine=fsdp", "fsdp.world_size=96", "algorithm.by_source=rl_coef=0@a,sft_coef=1@a"],
            r"data\.train_batch_size must be at least fsdp\.world_size \(96\), because algorithm\.by_source .*; got 64",
        ),
        (["actor.ppo_max_token_len=64", "actor.ppo_micro_batch_size=4"], r"actor\.ppo_max_token_len must be 0 with"),
        (["actor.optim.lr_scheduler_type=cosine"], r"lr_decay_steps must be greater than lr_warmup_steps \(16\)"),
        (["reward.overlong.buffer_len=9"], r"at most rollout\.response_length \(4\)"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm=ppo", "rollout.n=1"],
            r"rollout\.n must be at least 2 with algorithm\.filter_groups",
        ),
        (["model_engine=fsdp", "fsdp.cpu_offload=true", "fsdp.device=cpu"], r"fsdp\.cpu_offload must be false"),
        (["lora.rank=4", "lora.target_modules=q_prj"], r"Did you mean 'q_proj'\?"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_a_process_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


def test_a_critic_that_is_not_there_does_not_ask_for_divisibility():
    assert load_config(["data.train_batch_size=8", "actor.ppo_mini_batch_size=8"]).data.train_batch_size == 8


def test_memory_by_hand():
    apart = ["placement=separate"]
    full, lora = load_config(apart), load_config([*apart, "lora.rank=4", "rollout.num_workers=1"])
    assert needed_bytes(10, 10, full) == {"actor": 160, "rollout": 160, "weight sync": 40, "ref": 40}
    assert needed_bytes(10, 1, lora) == {"actor": 56, "rollout": 80}
    merged = load_config([*apart, "lora.rank=4", "rollout.num_workers=1", "lora.merge=true"])
    assert needed_bytes(10, 1, merged) == {"actor": 56, "rollout": 80, "weight sync": 40}
    assert needed_bytes(10, 10, load_config(["algorithm=ppo"]))["critic"] == 160
    check_memory(10, 10, full, 400)
    with pytest.raises(ConfigError, match=r"7,000,000,000 weights needs 260\.8 GiB .* Set lora\.rank"):
        check_memory(7_000_000_000, 7_000_000_000, full, 64 * 2**30)


def test_parameters_are_counted_from_the_headers(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, tmp_path / "model.safetensors")
    assert parameters(tmp_path) == 17
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello")
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        parameters(tmp_path)


# -- typos
def test_a_typo_in_any_of_fifty_sampled_keys_is_refused_with_the_right_suggestion():
    rng = random.Random(6)
    for key in rng.sample([option.key for option in options()], 50):
        place = rng.choice([i for i in range(len(key) - 1) if key[i] != key[i + 1]])
        typo = key[:place] + key[place + 1] + key[place] + key[place + 2 :]
        with pytest.raises(ConfigError) as caught:
            load_config([f"{typo}=1"])
        assert f"Did you mean '{key}'?" in str(caught.value), typo


# -- --explain and --diff
def test_explain_says_where_old_log_probs_are_recomputed_anyway():
    anyway = "here recompute in every step, since algorithm.rollout_correction.rollout_is compares them"
    assert anyway in explain("algorithm.old_log_prob", resolve(["algorithm.rollout_correction.rollout_is=token"]))
    assert "here recompute" not in explain("algorithm.old_log_prob", resolve([]))


def test_explain_says_meaning_default_and_origin(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("rollout: {n: 4}\n")
    resolved = resolve(["model_engine=fsdp", "actor.optim.lr=1e-3"], file)
    assert explain("rollout.n", resolved) == (
        f"rollout.n = 4   (--config {file})\n    responses per prompt\n    int, default 8\n\n"
        "layers, weakest first: defaults, default of model_engine=fsdp, "
        "placement=auto with one actor rank and rollout.name=hf, algorithm=grpo, preset=demo, "
        f"--config {file}, command line\n"
    )
    origins = {
        "actor.optim.lr": "command line",
        "actor.use_remove_padding": "default of model_engine=fsdp",
        "actor.clip_ratio_high": "preset=demo",
        "actor.use_kl_loss": "algorithm=grpo",
        "preset": "default",
        "actor.clip_ratio_c": "default",
    }
    for key, origin in origins.items():
        assert f"({origin})" in explain(key, resolved)
    assert "lora.rank = 0" in explain("model.lora_rank", resolved)
    assert explain("lora", resolved).count("default") >= 7
    with pytest.raises(ConfigError, match=r"Did you mean 'rollout\.n'"):
        explain("rolout.n", resolved)


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_sequences_that_can_not_be_joined_are_padded_unless_joining_is_asked_for(engine, tmp_path):
    reason = "has model_type='bloom', for which joining sequences is not tested"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    given = [f"model_engine={engine}", "algorithm=ppo", f"model.path={tmp_path}"]
    resolved = resolve(given)
    assert not resolved.config.actor.use_remove_padding
    assert not resolved.config.critic.use_remove_padding
    assert f"use_remove_padding = False   (model.path={tmp_path} {reason}" in explain(
        "actor.use_remove_padding", resolved
    )
    asked = resolve([*given, "actor.use_remove_padding=true"])
    assert asked.config.actor.use_remove_padding
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    joined = resolve(given)
    assert joined.config.critic.use_remove_padding
    assert f"(default of model_engine={engine})" in explain("actor.use_remove_padding", joined)


def test_diff_names_keys_values_and_origins(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load_config(["rollout.n=4"])))
    assert main(["--diff", "rollout.n=16 trainer.seed=3", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"rollout.n: 16 (command line) -> 4 ({file})",
        f"trainer.seed: 3 (command line) -> 0 ({file})",
    ]
    assert difference(read_side(""), read_side("algorithm=grpo")) == "no difference"


def test_a_side_of_diff_may_have_spaces_in_its_path_and_names_what_it_may_be(tmp_path):
    file = tmp_path / "my run.yaml"
    file.write_text("rollout: {n: 5}\n")
    assert read_side(str(file)).config.rollout.n == 5
    with pytest.raises(ConfigError, match=r"gone\.yaml is no folder of a run, no YAML file, and no setting such as"):
        read_side("gone.yaml")
    with pytest.raises(ConfigError, match=r"it's can't be read as settings: No closing quotation"):
        read_side("it's")
    assert read_side("rollout.n=5 " * 400).config.rollout.n == 5
