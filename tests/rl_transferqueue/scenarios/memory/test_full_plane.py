"""Puts on a full plane: the order in which they are served, and the message of a timeout."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from rl_protocol import BatchData, CapacityTimeout, ColumnSpec, dense
from rl_transferqueue import TransferQueueConfig, connect, start_local_plane

MIB = 1 << 20
SMALL = TransferQueueConfig(num_storage_units=1, capacity_mb=4, segment_mb=1)


def rows(nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.ones((1, nbytes), np.uint8))})


def test_a_small_put_does_not_wait_behind_a_large_one_that_does_not_fit() -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            await client.put("p", ["a"], rows(2 * MIB))
            large = asyncio.ensure_future(client.put("p", ["large"], rows(3 * MIB), timeout_s=60))
            await asyncio.sleep(0)
            # Wait until the large put has reached the controller.
            while not (await other.metrics()).waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for number in range(3):
                await other.put("small", [f"{number}"], rows(MIB))  # 3 MiB in total pass `large`
                await other.clear("small")
            assert not large.done()
            with pytest.raises(CapacityTimeout, match=rf"1 other put waits for {3 * MIB} bytes"):
                await other.put("small", ["late"], rows(MIB), timeout_s=0.05)
            await client.clear("p", ["a"])
            assert (await large).keys == ("large",)

    with start_local_plane(SMALL) as plane:
        asyncio.run(main())


def test_a_put_that_waited_in_vain_says_who_holds_the_memory() -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("train", ["a"], rows(MIB))
            read = await client.get(await client.put("gone", ["b"], rows(MIB // 2)))
            await client.clear("gone")
            draft = await client.alloc([ColumnSpec(name="x", kind="dense", dtype="uint8")], 2 * MIB)
            with pytest.raises(CapacityTimeout) as raised:
                await client.put("train", ["c"], rows(MIB), timeout_s=0.05)
            for told in (
                f"Held by rows: partition 'train' {MIB} bytes.",
                f"Reserved for puts: pid {os.getpid()} {2 * MIB} bytes.",
                f"Cleared, but still read: pid {os.getpid()} {MIB // 2} bytes.",
            ):
                assert told in str(raised.value)
            del read, draft

    with start_local_plane(SMALL) as plane:
        asyncio.run(main())
