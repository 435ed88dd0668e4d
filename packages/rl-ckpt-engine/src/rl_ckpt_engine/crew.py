"""A few threads that share the work of the calling one. They work on bytes alone, and only while the caller waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

MAX_THREADS = 4
"""More do not copy faster: a few cores use up the bandwidth of the memory."""
T = TypeVar("T")


class Crew:
    """Threads for one phase of a sync, the caller's among them: one for every two processors, since the other end of the sync works on the same
    host. They end with the context, so that nothing is left behind by a call that was cancelled, or lost in a fork.

    >>> with Crew() as crew:
    ...     crew.map(lambda number: number * number, 4)
    [0, 1, 4, 9]
    """

    def __init__(self) -> None:
        self._helpers = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "rl-ckpt-crew")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def map(self, work: Callable[[int], T], count: int) -> list[T]:
        """work(0) ... work(count - 1), in that order of results and any order of execution; the first error is raised when all have ended."""
        results: dict[int, T] = {}
        numbers = iter(range(count))  # its next() can't be interrupted by another thread

        def run() -> None:
            for number in numbers:
                results[number] = work(number)

        helping = [self._pool.submit(run) for _ in range(min(self._helpers, count - 1))]
        try:
            run()
        finally:
            for _ in numbers:  # after an error, nobody begins anything else
                pass
            wait(helping)
        for helper in helping:
            helper.result()
        return [results[number] for number in range(count)]
