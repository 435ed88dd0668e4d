"""One phase of a synchronisation over several peers at once, each under the same deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_ckpt_engine.handles import ReceiverHandle
from rl_protocol.errors import RLError, WeightSyncError

T = TypeVar("T")
H = TypeVar("H", bound=ReceiverHandle)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What came of a phase."""

    done: dict[str, T]
    """Name of the peer -> what it answered."""
    failed: dict[str, str]
    """Name of the peer -> why not."""


async def call_one(phase: str, peer: str, timeout_s: float, call: Awaitable[T]) -> T:
    """Await one call of one peer under a deadline. This is the boundary at which the errors of peers become WeightSyncError.

    Raises:
        WeightSyncError: the call failed or did not end in time; names phase and peer.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except (RLError, TimeoutError, OSError) as error:
        if limit.expired():
            raise WeightSyncError(
                f"{phase}: {peer} did not answer within {timeout_s} s", peer=peer, phase=phase
            ) from error
        reason = str(error).rstrip(".") or type(error).__name__
        raise WeightSyncError(f"{phase}: {peer} failed: {reason}", peer=peer, phase=phase) from error


async def call_all(
    phase: str,
    receivers: Mapping[str, H],
    timeout_s: float,
    call: Callable[[H], Awaitable[T]],
) -> Outcome[T]:
    """The same call of every receiver, concurrently; the failure of one does not touch the others.

    An error that is not a peer's (a bug) is raised after all calls have ended.
    """
    results = await asyncio.gather(
        *(call_one(phase, name, timeout_s, call(handle)) for name, handle in receivers.items()), return_exceptions=True
    )
    done: dict[str, T] = {}
    failed: dict[str, str] = {}
    for name, result in zip(receivers, results, strict=True):
        if isinstance(result, WeightSyncError):
            failed[name] = result.message
        elif isinstance(result, BaseException):
            raise result
        else:
            done[name] = result
    return Outcome(done, failed)


def listed(reasons: Mapping[str, str]) -> str:
    """The reasons as the tail of a message, one sentence each; empty without any."""
    return "".join(f" {reason}." for reason in reasons.values())
