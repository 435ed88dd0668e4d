"""One turn of the policy, in as many parts as updates of the weights cut it into."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from rl_protocol.ports import Generation

MOST_ABORTS = 64
"""Times one turn is continued after an abort, each an update of the weights in its middle."""


async def parts_of_turn(
    ask: Callable[[tuple[int, ...], int], Awaitable[Generation]], budget: int
) -> tuple[list[Generation], Literal["stop", "length", "abort"]]:
    """What the policy says until its turn ends, and why it does; a part that was aborted is gone on from, with what there is of the turn.

    Args:
        ask: for at most so many tokens after those of the turn.
        budget: tokens of the turn, at least 1.
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
        if len(parts) > MOST_ABORTS:
            return parts, "abort"
