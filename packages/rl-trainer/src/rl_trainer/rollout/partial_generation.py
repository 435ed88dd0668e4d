"""Generates one turn, continuing it when an update of the weights aborts it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from rl_protocol.ports import Generation

MAX_ABORTS = 64
"""Most continuations of one turn."""


async def generate_turn(
    ask: Callable[[tuple[int, ...], int], Awaitable[Generation]], budget: int
) -> tuple[list[Generation], Literal["stop", "length", "abort"]]:
    """Generate one turn; returns its parts and why it ended.

    An aborted generation is resumed from its partial tokens.

    Args:
        ask: generates at most the given number of tokens after the given tokens of the turn.
        budget: most tokens of the turn, at least 1.
    """
    made: tuple[int, ...] = ()
    parts: list[Generation] = []
    while True:
        parts.append(await ask(made, budget - len(made)))
        made += parts[-1].response_ids
        if parts[-1].finish_reason != "abort":
            return parts, parts[-1].finish_reason
        if len(made) >= budget:
            return parts, "length"
        if len(parts) > MAX_ABORTS:
            return parts, "abort"
