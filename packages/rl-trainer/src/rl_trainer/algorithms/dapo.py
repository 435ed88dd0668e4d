"""DAPO's data side (Yu et al. 2025, arXiv:2503.14476): which prompts are worth a step, when to generate more, what overlong responses cost.

Pure decisions: whoever generates asks `next_round` after each round and obeys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.episodes import FloatArray, IntArray


def prompts_that_teach(keys: Sequence[RowKey], metric: FloatArray) -> list[str]:
    """Uids, in order of first appearance, whose sessions differ in `metric` [N] (section 3.2). Of a session the last trajectory is looked at.

    A prompt with one session is kept: there is nothing to compare.
    """
    final: dict[tuple[str, int], tuple[int, float]] = {}
    for key, value in zip(keys, metric.tolist(), strict=True):
        known = final.get((key.uid, key.session))
        if known is None or key.index > known[0]:
            final[key.uid, key.session] = key.index, value
    values: dict[str, list[float]] = {}
    for (uid, _), (_, value) in final.items():
        values.setdefault(uid, []).append(value)
    return [uid for uid, items in values.items() if len(items) == 1 or min(items) < max(items)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Enough: train on these prompts."""

    uids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Roll out this many further prompts."""

    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The rounds are used up; these prompts are all there is."""

    uids: tuple[str, ...]


def next_round(
    kept: Sequence[str], *, wanted: int, generated: int, rounds: int, max_rounds: int
) -> Train | Generate | GiveUp:
    """What to do after `rounds` rounds of generation in which `generated` prompts gave the `kept` ones that teach.

    As many prompts are asked for as the share kept so far makes likely to be enough, never fewer than are missing, never more than `wanted`.
    Surplus prompts are left out, the oldest are taken first.

    Raises:
        ConfigError: wanted or max_rounds below 1.
    """
    if wanted < 1 or max_rounds < 1:
        raise ConfigError(
            f"Dynamic filtering needs wanted and max_rounds of at least 1; got {wanted} and {max_rounds}."
        )
    if len(kept) >= wanted:
        return Train(uids=tuple(kept[:wanted]))
    if rounds >= max_rounds:
        return GiveUp(uids=tuple(kept))
    missing = wanted - len(kept)
    likely = ceil(missing * generated / len(kept)) if kept else wanted
    return Generate(num_prompts=min(max(likely, missing), wanted))


def overlong_penalty(lengths: IntArray, *, max_length: int, buffer: int, factor: float = 1.0) -> FloatArray:
    """[N] soft punishment (eq. 13), to be added to the score: 0 up to max_length - buffer tokens, then falling linearly to -factor at max_length.

    Raises:
        ConfigError: buffer not within 1..max_length, or a negative factor.
    """
    if not 1 <= buffer <= max_length or factor < 0:
        raise ConfigError(
            f"The overlong buffer must be within 1..{max_length} tokens and its factor at least 0; got {buffer} and {factor}."
        )
    over = (lengths - (max_length - buffer)) / buffer
    return 0.0 - factor * np.clip(over, 0.0, 1.0)
