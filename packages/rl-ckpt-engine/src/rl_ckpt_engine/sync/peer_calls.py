"""Call one peer, or all receivers concurrently, under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rl_ckpt_engine.endpoints.receiver import ReceiverHandle
from rl_protocol.errors import RLError, WeightSyncError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Results of the same call to several peers."""

    done: dict[str, T]
    """Name of the peer -> its answer."""
    failed: dict[str, str]
    """Name of the peer -> why it failed."""


async def call_one(phase: str, peer: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call to one peer under a deadline, turning its errors into WeightSyncError.

    A task of it that is cancelled before it runs makes no call.

    Raises:
        WeightSyncError: the call failed or timed out; names phase and peer.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call()
    except (RLError, TimeoutError, OSError) as error:
        if limit.expired():
            raise WeightSyncError(
                f"{phase}: {peer} did not answer within {timeout_s} s", peer=peer, phase=phase
            ) from error
        reason = str(error).rstrip(".") or type(error).__name__
        raise WeightSyncError(f"{phase}: {peer} failed: {reason}", peer=peer, phase=phase) from error


async def call_all(
    phase: str,
    receivers: Mapping[str, ReceiverHandle],
    timeout_s: float,
    call: Callable[[ReceiverHandle], Awaitable[T]],
) -> Outcome[T]:
    """Call every receiver concurrently; the failure of one does not affect the others.

    An unexpected exception (a bug) is raised after all calls have ended.
    """
    results = await asyncio.gather(
        *(call_one(phase, name, timeout_s, partial(call, handle)) for name, handle in receivers.items()),
        return_exceptions=True,
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


def format_failures(reasons: Iterable[str]) -> str:
    """The reasons as the end of a message, one sentence each; empty if there are none."""
    return "".join(f" {reason}." for reason in reasons)
