"""Runs coroutines concurrently, with one error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from rl_protocol import DataLostError, RLError

T = TypeVar("T")


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
