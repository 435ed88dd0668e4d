"""Every key of verl's configuration is mapped, refused with a reason, or has no effect here."""

from __future__ import annotations

import pytest

from rl_app_ppo.cli.explain import explain
from rl_app_ppo.config.loading import load_config, options, resolve
from rl_app_ppo.config.verl_keys.key_entries import Lost, Note, Verl
from rl_app_ppo.config.verl_keys.table import TABLE, describe, find
from rl_app_ppo.verl_import.convert import import_verl
from rl_app_ppo.verl_import.reading import defaults, defaults_file, resolved_defaults
from rl_protocol import ConfigError

KEYS = {option.key for option in options()}
ENGINES = tuple(defaults_file()["engines"])
SAMPLES = (None, 1, 0, -1, 2.5, True, False, "fsdp", "cosine", "x", [0.9, 0.95], ["a", "b"])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_of_verls_configuration_is_in_the_table(engine):
    keys = {*defaults(engine), *resolved_defaults(engine)}
    assert len(keys) > 700
    assert [key for key in sorted(keys) if find(key) is None and not key.endswith("_target_")] == []


def test_every_entry_says_why_or_what():
    for entry in TABLE:
        assert entry.keys
        assert entry.convert is not None or entry.why, entry.keys
        assert set(entry.to) <= KEYS, entry.keys


def test_every_exact_key_of_the_table_is_verls_or_of_a_group_that_takes_more():
    """Detects entries whose key was renamed in verl."""
    known = {key for engine in ENGINES for key in {*defaults(engine), *resolved_defaults(engine)}}
    exact = {key for entry in TABLE for key in entry.keys if not key.endswith(".*")}
    more = {
        "model_engine",  # a group of configurations
        "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_weights",
        "data.cache_dir",
        "actor_rollout_ref.actor.policy_loss.dro_beta",  # of verl after 0.9.1
        "actor_rollout_ref.rollout.limit_images",
        "actor_rollout_ref.rollout.checkpoint_manager_class",
        "critic.pad_to_length",
        "critic.use_torch_compile",
        *(f"{role}.optim.grad_clip" for role in ("actor_rollout_ref.actor", "critic")),
        *(f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("grad_offload",)),
    }
    parts = (
        "overlong_buffer",
        "reward_kwargs",
        "override_optimizer_config",
        "override_transformer_config",
        "critic.model.lora",
        "async_training.",  # of verl's fully_async, whose configuration is another
    )
    assert {key for key in exact - known - more if not any(part in key for part in parts)} == set()


def test_a_conversion_gives_keys_that_its_entry_names_for_any_value():
    for entry in TABLE:
        for key in entry.keys:
            for value in SAMPLES if entry.convert is not None else ():
                verl = Verl({**resolved_defaults("fsdp"), key: value}, frozenset({key}))
                try:
                    answer = entry.answer(value, verl)
                except (TypeError, ValueError, IndexError, ZeroDivisionError):
                    continue  # this sample has another type than verl's value
                settings = {Lost: {}, Note: getattr(answer, "settings", None) or {}}.get(type(answer), answer)
                assert set(settings) <= set(entry.to), key


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_verls_defaults_lose_nothing(engine):
    imported = import_verl({"model_engine": engine})
    assert imported.lost == {}
    assert set(imported.settings) <= KEYS
    # the same defaults, given explicitly
    given = import_verl({**defaults(engine), "model_engine": engine})
    assert given.lost == {}
    assert given.settings == imported.settings


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("critic.enable=true", "It is a key of verl, which has no counterpart here: .*adv_estimator"),
        ("actor_rollout_ref.actor.ppo_epochs=2", r"here it is actor\.ppo_epochs\."),
        ("+actor_rollout_ref.actor.ppo_epochs=2", r"here it is actor\.ppo_epochs\."),
        ("actor_rollout_ref.actor.clip_ratio=0.3", r"here it is actor\.clip_ratio_low and actor\.clip_ratio_high"),
        ("data.tokenizer=x", "is not supported: the tokenizer is that of model.path"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.x=1", "has no effect here: the rollout engine's own settings"),
        (
            "actor_rollout_ref.actor.megatron=x",
            "It is a group of verl's keys; give one of its keys, such as actor_rollout_ref",
        ),
        ("trainer.default_local_dir=x", r"here it is trainer\.output_dir"),
        (
            "trainer.v1.separate_async.parameter_sync_step=2",
            "has no effect here: the weights are sent after every step",
        ),
        ("async_training.staleness_threshold=0.5", "share of the samples of a step; set async_rl.max_staleness"),
        ("grpo.async_grpo.enabled=true", r"It is a key of NeMo-RL; here it is async_rl\.max_staleness, above 0\."),
        ("async_rl.sampler.max_lookahead_versions=1", r"It is a key of NeMo-RL; here it is async_rl\.depth"),
        ("rollout.max_concurrent_rollouts=8", r"It is a key of AReaL; here it is async_rl\.max_inflight_prompts"),
        ("actor.use_decoupled_loss=true", r"It is a key of AReaL; here it is algorithm\.old_log_prob=recompute or"),
    ],
)
def test_a_command_line_that_uses_another_trainers_key_is_told_what_it_is_here(key, answer):
    with pytest.raises(ConfigError, match=answer):
        load_config([key])
    with pytest.raises(ConfigError, match=answer):
        explain(key.partition("=")[0], resolve([]))


def test_what_is_no_key_of_verl_gets_the_nearest_key():
    assert describe("rollout.nn") == ""
    with pytest.raises(ConfigError, match=r"Unknown key 'rollout\.nn'\. Did you mean 'rollout\.n'\?"):
        load_config(["rollout.nn=2"])
