"""Generates one turn, continuing it when an update of the weights aborts it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from rl_protocol.ports import Generation

MAX_ABORTS = 64
"""Most continuations of one turn."""


async def generate_turn(
    ask: Callable[[tuple[int, ...], int], Awaitable[Generation]],
    budget: int,
    ended_at: Callable[[Sequence[int]], int | None] | None = None,
) -> tuple[list[Generation], Literal["stop", "length", "abort"]]:
    """Generate one turn; returns its parts and why it ended.

    An aborted generation is resumed from its partial tokens.

    Args:
        ask: generates at most the given number of tokens after the given tokens of the turn.
        budget: most tokens of the turn, at least 1.
        ended_at: number of tokens of the turn up to the one that completes a stop string, or None.
            It finds strings that are completed by the continuation of an aborted generation.
    """
    made: tuple[int, ...] = ()
    parts: list[Generation] = []
    while True:
        parts.append(await ask(made, budget - len(made)))
        made += parts[-1].response_ids
        end = ended_at(made) if ended_at is not None and len(parts) > 1 else None
        if end is not None:
            parts[-1] = _shortened(parts[-1], len(made) - end)
            return parts, "stop"
        if parts[-1].finish_reason != "abort":
            return parts, parts[-1].finish_reason
        if len(made) >= budget:
            return parts, "length"
        if len(parts) > MAX_ABORTS:
            return parts, "abort"


def _shortened(part: Generation, by: int) -> Generation:
    """A part without its last `by` tokens."""
    kept = len(part.response_ids) - by
    return msgspec.structs.replace(
        part,
        response_ids=part.response_ids[:kept],
        log_probs=part.log_probs[:kept],
        finish_reason="stop",
        kept=None if part.kept is None else part.kept.head(kept),
        routed=None if part.routed is None else part.routed[: len(part.routed) - by],
    )
