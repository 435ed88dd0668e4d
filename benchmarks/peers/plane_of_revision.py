"""A data plane of some revision of this repository, in a process that obeys the benchmark.

It is started with the sources of that revision on PYTHONPATH, so it uses only what all revisions
have. It prints a line with its process ids, and then, for each line `put|get BYTES CALLS` that it
reads, one line once the calls have ended: puts of dense rows of that many bytes, 8 at a time, into
a plane whose rows do not survive, or gets of them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

import numpy as np

from rl_protocol import BatchData, KVBatchMeta, dense
from rl_transferqueue import Client, TransferQueueConfig, connect, start_local_plane

IN_FLIGHT = 8
ROWS = 64
"""Rows of a put of at least so many bytes; a smaller one has one row."""


class Calls:
    """Makes calls through one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._batches: dict[int, BatchData] = {}
        self._there: dict[int, KVBatchMeta] = {}

    async def put(self, nbytes: int, calls: int) -> None:
        """Put so many bytes so many times, under new keys, and clear them."""
        if nbytes not in self._batches:
            rows = ROWS if nbytes >= 4 * ROWS else 1
            self._batches[nbytes] = BatchData({"x": dense(np.zeros((rows, nbytes // rows // 4), np.float32))})

        async def one() -> None:
            number = next(self._numbers)
            batch = self._batches[nbytes]
            await self._client.put("p", [f"{number}-{row}" for row in range(len(batch))], batch)

        for start in range(0, calls, IN_FLIGHT):
            await asyncio.gather(*(one() for _ in range(start, min(calls, start + IN_FLIGHT))))
        await self._client.clear("p")

    async def get(self, nbytes: int, calls: int) -> None:
        """Get so many bytes so many times, and read them."""
        if nbytes not in self._there:
            rows = ROWS if nbytes >= 4 * ROWS else 1
            batch = BatchData({"x": dense(np.ones((rows, nbytes // rows // 4), np.float32))})
            self._there[nbytes] = await self._client.put(f"g{nbytes}", [str(row) for row in range(rows)], batch)
        for _ in range(calls):
            found = await self._client.get(self._there[nbytes], ["x"])
            found.dense("x").values[..., ::1024].sum()


async def main() -> None:
    """Obey until the input ends."""
    with start_local_plane(TransferQueueConfig(capacity_mb=2048)) as plane:
        async with await connect(plane.descriptor) as client:
            calls = Calls(client)
            print(*plane.pids, os.getpid(), flush=True)
            while words := (await asyncio.to_thread(sys.stdin.readline)).split():
                what, nbytes, count = words
                await (calls.put if what == "put" else calls.get)(int(nbytes), int(count))
                print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
