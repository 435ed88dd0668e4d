"""Runs coroutines concurrently, with one error; and waits with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from rl_protocol import DataLostError, HangError, RLError

T = TypeVar("T")
S = TypeVar("S")


@asynccontextmanager
async def deadline(timeout_s: float, what: str) -> AsyncGenerator[None]:
    """Wait within for at most so long.

    Args:
        timeout_s: seconds.
        what: what is waited for, for the message.

    Raises:
        HangError: the wait was longer.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise HangError(
            f"The driver has waited for {what} for {timeout_s:g} s, which is longer than all stages before it may take; "
            "raise LoopConfig.stage_timeout_s if they are this slow."
        ) from None


async def gather_or_cancel(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently; the first failure cancels the rest and is raised as itself.

    After a DataLostError the rest still finish. The step may be repeated, and no call of its first
    attempt may write rows by then.
    """
    lost: list[DataLostError] = []

    async def run(one: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await one
        except DataLostError as error:
            lost.append(error)
            return None

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(w)) for w in work]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    if lost:
        raise lost[0]
    return [cast("T", task.result()) for task in running]


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, S]) -> tuple[T, S]:
    """Run two coroutines of different results, as `gather_or_cancel` does."""
    first, second = await gather_or_cancel(cast("Coroutine[Any, Any, Any]", one), other)
    return first, second
