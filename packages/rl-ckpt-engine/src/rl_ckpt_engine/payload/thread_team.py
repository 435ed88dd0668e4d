"""ThreadTeam: a few threads that share byte-level work with the waiting caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

from rl_protocol.support.host.this_process import usable_cores

MAX_THREADS = 4
"""More threads do not copy faster: a few cores saturate the memory bandwidth."""
T = TypeVar("T")


class ThreadTeam:
    """Threads for one phase of a sync, including the caller's.

    There is one for every second processor, up to MAX_THREADS. On two processors of an AMD EPYC,
    which share the memory bandwidth, a second thread raised the CPU time by 40 to 70 % and the
    speed by at most 8 %. The threads end with the context, so none outlives a cancelled call or is
    lost in a fork.

    >>> with ThreadTeam() as crew:
    ...     crew.map(lambda number: number * number, 4)
    [0, 1, 4, 9]
    """

    def __init__(self) -> None:
        self._helpers = max(1, min(MAX_THREADS, usable_cores() // 2)) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "rl-ckpt-team")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def map(self, work: Callable[[int], T], count: int) -> list[T]:
        """The results of work(0) ... work(count - 1), executed in any order.

        The first error is raised after all threads have stopped.
        """
        helpers = min(self._helpers, count - 1)
        if helpers < 1:
            return [work(number) for number in range(count)]
        results: dict[int, T] = {}
        numbers = iter(range(count))  # its next() is atomic

        def run() -> None:
            for number in numbers:
                results[number] = work(number)

        helping = [self._pool.submit(run) for _ in range(helpers)]
        try:
            run()
        finally:
            for _ in numbers:  # after an error, start no further work
                pass
            wait(helping)
        for helper in helping:
            helper.result()
        return [results[number] for number in range(count)]
