"""How every key of verl's PPO configuration is converted. The first entry that matches a key holds.

`tests/rl_app_ppo/test_verl_table.py` checks it against `defaults.json`, the keys of verl's own configuration.
"""

from __future__ import annotations

import functools

from rl_app_ppo.verl.entries import Entry
from rl_app_ppo.verl.tables import algorithm, data, models, rollout, run

TABLE: tuple[Entry, ...] = (*models.ENTRIES, *rollout.ENTRIES, *data.ENTRIES, *algorithm.ENTRIES, *run.ENTRIES)


@functools.cache
def _exact() -> dict[str, Entry]:
    return {key: entry for entry in reversed(TABLE) for key in entry.keys if not key.endswith(".*")}


@functools.cache
def _groups() -> tuple[tuple[str, Entry], ...]:
    return tuple((key.removesuffix("*"), entry) for entry in TABLE for key in entry.keys if key.endswith(".*"))


def find(key: str) -> Entry | None:
    """The entry of a key of verl, written without + and ~; None: verl has no such key."""
    if key in _exact():
        return _exact()[key]
    return next((entry for group, entry in _groups() if key.startswith(group) or key == group.removesuffix(".")), None)


def describe(key: str) -> str:
    """Answer to a command line that uses a key of verl; empty if verl has no such key."""
    key = key.lstrip("+~")
    inside = next(
        (name for entry in TABLE for name in entry.keys if name.startswith(f"{key}.") and not name.endswith(".*")), ""
    )
    if inside:
        return f"It is a group of verl's keys; give one of its keys, such as {inside}, to learn what that is here."
    entry = find(key)
    if entry is None:
        return ""
    if entry.to:
        return f"It is a key of verl; here it is {' and '.join(entry.to)}."
    if entry.turn is not None:
        return f"It is a key of verl, which has no counterpart here: {entry.why}."
    kind = "is not supported" if entry.loses else "has no effect here"
    return f"It is a key of verl, which {kind}: {entry.why}."
