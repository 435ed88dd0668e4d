"""Keys of NeMo-RL and AReaL for asynchronous training that a run does not accept, and what to set.

Those that mean the same are in `rl_app_ppo.config.verl_keys.aliases`, and verl's other keys in
`rl_app_ppo.config.verl_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping

_WEIGHTS = "algorithm.rollout_correction.rollout_is"
_CAP = "here it is algorithm.rollout_correction.rollout_is_threshold"
_KEYS: Mapping[str, Mapping[str, str]] = {
    "NeMo-RL": {
        "grpo.async_grpo.enabled": "here it is async_rl.max_staleness, above 0",
        "grpo.async_grpo.max_generation_failures": "here it is replay.on_failure and replay.max_attempts",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": "here the keys and values of a response that new weights continue "
        "are always computed again",
        "async_rl.sampler.max_lookahead_versions": "here it is async_rl.depth, which is at least 1 in an asynchronous run",
        "async_rl.max_buffered_rollouts": "here the size of the buffer follows from async_rl.depth",
        "loss_fn.use_importance_sampling_correction": f"here it is {_WEIGHTS}=token",
    },
    "AReaL": {
        "rollout.max_concurrent_rollouts": "here it is async_rl.max_inflight_prompts, in prompts",
        "actor.use_decoupled_loss": f"here it is algorithm.old_log_prob=recompute or interpolate with {_WEIGHTS}=token",
        "actor.behave_imp_weight_cap": _CAP,
        "actor.behav_imp_weight_cap": _CAP,
        "actor.recompute_logprob": "here it is algorithm.old_log_prob=recompute",
    },
}
"""Trainer -> its key -> what to set here."""


def describe_other(key: str) -> str:
    """The hint for a key of another trainer than verl; empty if none of them has it."""
    found = ((trainer, keys[key]) for trainer, keys in _KEYS.items() if key in keys)
    return next((f"It is a key of {trainer}; {here}." for trainer, here in found), "")
