"""DAPO (Yu et al. 2025, arXiv:2503.14476): dynamic sampling and the overlong penalty.

Pure decisions. The driver calls `next_round` after each round of generation and follows the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.arrays import FloatArray, IntArray


def informative_prompts(keys: Sequence[RowKey], metric: FloatArray) -> list[str]:
    """Uids of the prompts whose sessions differ in `metric` [N] (section 3.2).

    In order of first appearance. Only the last trajectory of a session counts. A prompt with one
    session, such as one whose others failed, is left out like one whose sessions are all equal: its
    advantage within the group is 0.
    """
    final: dict[tuple[str, int], tuple[int, float]] = {}
    for key, value in zip(keys, metric.tolist(), strict=True):
        known = final.get((key.uid, key.session))
        if known is None or key.index > known[0]:
            final[key.uid, key.session] = key.index, value
    values: dict[str, list[float]] = {}
    for (uid, _), (_, value) in final.items():
        values.setdefault(uid, []).append(value)
    return [uid for uid, items in values.items() if min(items) < max(items)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """There are enough prompts: train on these."""

    uids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Roll out this many more prompts."""

    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """No rounds are left; only these prompts were found."""

    uids: tuple[str, ...]


def next_round(
    kept: Sequence[str], *, wanted: int, generated: int, rounds: int, max_rounds: int
) -> Train | Generate | GiveUp:
    """Decide whether to train, generate more or give up.

    So far, `rounds` rounds have generated `generated` prompts, of which those in `kept` are
    informative.

    The number of prompts to generate next is estimated from the share kept so far; it is at least
    the number of missing prompts and at most `wanted`. Surplus prompts are dropped, the newest
    first.

    Raises:
        ConfigError: wanted or max_rounds is below 1.
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
    """[N] soft overlong penalty (eq. 13), to be added to the score.

    0 for up to max_length - buffer tokens, then decreasing linearly to -factor at max_length.

    Raises:
        ConfigError: buffer is not within 1..max_length, or factor is negative.
    """
    if not 1 <= buffer <= max_length or factor < 0:
        raise ConfigError(
            f"The overlong buffer must be within 1..{max_length} tokens and its factor at least 0; got {buffer} and {factor}."
        )
    over = (lengths - (max_length - buffer)) / buffer
    return 0.0 - factor * np.clip(over, 0.0, 1.0)
