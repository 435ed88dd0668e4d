"""The table of all keys of verl's PPO configuration; the first entry that matches a key applies.

Options declare the keys whose values mean the same (`verl=` of `rl_protocol.support.options`); the
tables have those that are converted, are refused, or have no effect.

`tests/rl_app_ppo/config/verl_keys/test_table.py` compares it with verl's configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.key_entries import Entry, converted, same
from rl_app_ppo.config.verl_keys.tables import algorithm, data, models, rollout, run
from rl_protocol.support.option_tree import list_options


def _declared() -> Iterator[Entry]:
    """The keys that options declare as their spellings in verl."""
    for option in list_options(AppConfig):
        of_adapters = option.key.startswith("lora.") and option.key != "lora.merge"
        for key in option.verl:
            if of_adapters:
                yield converted(key, option.key, conversions.lora(key, option.key))
            elif option.key == "rollout.top_p":
                yield converted(key, f"{option.key} rollout.sampling_replay", conversions.kept_tokens(option.key))
            else:
                yield same(key, option.key)


TABLE: tuple[Entry, ...] = (
    *_declared(),
    *models.ENTRIES,
    *rollout.ENTRIES,
    *data.ENTRIES,
    *algorithm.ENTRIES,
    *run.ENTRIES,
)


@functools.cache
def _exact() -> dict[str, Entry]:
    return {key: entry for entry in reversed(TABLE) for key in entry.keys if not key.endswith(".*")}


@functools.cache
def _groups() -> tuple[tuple[str, Entry], ...]:
    return tuple((key.removesuffix("*"), entry) for entry in TABLE for key in entry.keys if key.endswith(".*"))


def find(key: str) -> Entry | None:
    """The entry of a verl key without its + or ~; None: verl has no such key."""
    if key in _exact():
        return _exact()[key]
    return next((entry for group, entry in _groups() if key.startswith(group) or key == group.removesuffix(".")), None)


def describe(key: str) -> str:
    """The hint for a verl key on the command line; empty if verl has no such key."""
    key = key.lstrip("+~")
    inside = next(
        (name for entry in TABLE for name in entry.keys if name.startswith(f"{key}.") and not name.endswith(".*")), ""
    )
    if inside:
        return f"It is a group of verl's keys; give one of its keys, such as {inside}, to see its counterpart."
    entry = find(key)
    if entry is None:
        return ""
    if entry.to:
        return f"It is a key of verl; here it is {' and '.join(entry.to)}."
    if entry.convert is not None:
        return f"It is a key of verl, which has no counterpart here: {entry.why}."
    kind = "is not supported" if entry.loses else "has no effect here"
    return f"It is a key of verl, which {kind}: {entry.why}."
