"""Spellings of other trainers that a run accepts beside ours, where they mean the same.

These are verl's keys of `lora.*`, for which it has two schemas, and BYPASS; and the keys of
asynchronous training of verl, NeMo-RL and AReaL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.options import items, require

BYPASS, OLD_LOG_PROB = "algorithm.rollout_correction.bypass_mode", "algorithm.old_log_prob"
BOUND, ON_UPDATE = "async_rl.max_staleness", "async_rl.on_update"
PARTIAL: Mapping[bool | str, str] = {True: "continue", False: "finish"}
"""Whether new weights continue the responses that are being generated -> ON_UPDATE."""
SPELLINGS: Mapping[str, str] = {
    spelling: option.key
    for option in list_options(AppConfig)
    if option.key.startswith("lora.")
    for verl in option.verl
    for spelling in (verl, verl.removeprefix("actor_rollout_ref."))
} | {
    BYPASS: OLD_LOG_PROB,
    "trainer.v1.sampler.max_off_policy_threshold": BOUND,
    "trainer.v1.sampler.max_off_policy_strategy": "async_rl.when_stale",
    "async_training.partial_rollout": ON_UPDATE,
    "grpo.async_grpo.max_trajectory_age_steps": BOUND,
    "grpo.async_grpo.in_flight_weight_updates": ON_UPDATE,
    "async_rl.sampler.max_staleness_versions": BOUND,
    "async_rl.sampler.name": "async_rl.order",
    "rollout.max_head_offpolicyness": BOUND,
    "actor.prox_logp_method": OLD_LOG_PROB,
}
"""Another trainer's key -> our key."""
VALUES: Mapping[str, Mapping[bool | str, str]] = {
    BYPASS: {True: "rollout", False: "recompute"},
    "async_training.partial_rollout": PARTIAL,
    "grpo.async_grpo.in_flight_weight_updates": PARTIAL,
    "async_rl.sampler.name": {"in_order": "in_order", "ready_first": "ready_first"},
    "actor.prox_logp_method": {"recompute": "recompute", "loglinear": "interpolate"},
}
"""Another trainer's key -> its values -> ours; values of other keys mean the same."""
_SPELLED = frozenset(SPELLINGS.values())


def our_value(key: str, given: object) -> str:
    """Our value of a key of VALUES.

    Raises:
        ConfigError: the key has no such value, or the value has no counterpart here.
    """
    known = VALUES[key]
    ours = [ours for theirs, ours in known.items() if type(theirs) is type(given) and theirs == given]
    require(len(ours) == 1, key, " or ".join(str(theirs).lower() for theirs in known), given)
    return ours[0]


def one_spelling(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Replace every spelling by ours in all layers, (origin, key -> value) each.

    Raises:
        ConfigError: two spellings of one setting have different values; names both keys.
    """
    seen: dict[str, tuple[str, Any]] = {}
    out: list[tuple[str, dict[str, Any]]] = []
    for origin, values in layers:
        ours: dict[str, Any] = {}
        for key, given in values.items():
            name = SPELLINGS.get(key, key)
            value = "" if given is None and name.startswith("lora.") else given  # null in verl
            value = our_value(key, value) if key in VALUES else value
            if name in _SPELLED:
                other, before = seen.get(name, (key, value))
                if other != key and items(before) != items(value):
                    raise ConfigError(
                        f"{other}={before} and {key}={value} are the same setting with different values; set {name} alone."
                    )
                seen[name] = key, value
            ours[name] = value
        out.append((origin, ours))
    return out
