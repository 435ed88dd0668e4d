"""Random calls have the same results on a real plane and on the in-memory reference."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from rl_protocol import BatchData, KVBatchMeta, MissingDataError, PlaneTimeout, dense, ragged
from rl_protocol.ports import DataPlane
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.testing.sample_batches import assert_same_column
from rl_transferqueue import Client, LocalPlane, connect

KEYS = [f"k{i}" for i in range(24)]


def columns(rng: random.Random, rows: int) -> BatchData:
    data = {
        "d": dense(np.frombuffer(rng.randbytes(rows * 512), np.int64).reshape(rows, 64)),
        "r": ragged([[rng.randrange(100)] * rng.randrange(40) for _ in range(rows)], "int32"),
    }
    return BatchData({name: data[name] for name in rng.sample(sorted(data), rng.randint(1, 2))})


def same(got: BatchData, want: BatchData) -> None:
    assert got.field_names == want.field_names
    for name in want.field_names:
        assert_same_column(got[name], want[name])


def described(meta: KVBatchMeta) -> tuple[object, ...]:
    return meta.keys, meta.tags, set(meta.fields)


async def outcome(plane: DataPlane, wish: dict[str, Any], timeout_s: float) -> tuple[KVBatchMeta | None, str]:
    try:
        return await plane.wait_ready("p", **wish, timeout_s=timeout_s), ""
    except PlaneTimeout as error:
        return None, str(error)


class Pair:
    """Makes the same calls on both planes; on the real plane, with a random client."""

    def __init__(self, clients: list[Client], rng: random.Random) -> None:
        self.reference = MemoryDataPlane()
        self.clients = clients
        self.rng = rng
        self.kept: list[tuple[BatchData, BatchData]] = []

    @property
    def planes(self) -> list[DataPlane]:
        return [self.rng.choice(self.clients), self.reference]

    async def put(self) -> None:
        keys = self.rng.sample(KEYS, self.rng.randint(1, 16))
        data = columns(self.rng, len(keys)) if self.rng.random() < 0.9 else None
        tags = [{"n": self.rng.randrange(2)} for _ in keys] if self.rng.random() < 0.5 else None
        for plane in self.planes:
            await plane.put("p", keys, data, tags=tags)

    async def get(self) -> None:
        meta = await self.reference.list_rows("p", where={"n": 1} if self.rng.random() < 0.2 else None)
        keys = self.rng.sample(meta.keys, self.rng.randint(0, len(meta)))
        fields = self.rng.choice([["d"], ["r"], ["d", "r"], []])
        ask = KVBatchMeta(partition="p", keys=tuple(keys if self.rng.random() < 0.7 else sorted(keys)))
        plane, reference = self.planes
        try:
            want = await reference.get(ask, fields)
        except MissingDataError:
            with pytest.raises(MissingDataError):
                await plane.get(ask, fields)
            return
        got = await plane.get(ask, fields)
        same(got, want)
        self.kept.append((got, want))

    async def wait(self) -> None:
        wish = {
            "count": self.rng.randint(0, 4),
            "fields": self.rng.choice([[], ["d"], ["r", "d"]]),
            "where": self.rng.choice([None, {"n": 1}]),
            "task": self.rng.choice([None, "s", "t"]),
        }
        plane, reference = self.planes
        want, refusal = await outcome(reference, wish, 0.001)
        if want is not None:
            got, _ = await outcome(plane, wish, 5)
            assert got is not None
            assert described(got) == described(want)
        else:
            got, own_refusal = await outcome(plane, wish, 0.001)
            assert got is None
            assert own_refusal.split(" were ready")[0] == refusal.split(" were ready")[0]

    async def clear(self) -> None:
        keys = None if self.rng.random() < 0.1 else self.rng.sample(KEYS, self.rng.randint(0, 12))
        plane, reference = self.planes
        assert await plane.clear("p", keys) == await reference.clear("p", keys)

    async def forget(self) -> None:
        for got, want in self.kept:
            same(got, want)
        self.kept = self.rng.sample(self.kept, len(self.kept) // 2)


@pytest.mark.parametrize("seed", range(4))
def test_a_plane_does_what_the_reference_does(plane: LocalPlane, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with await connect(plane.descriptor) as one, await connect(plane.descriptor) as two:
            pair = Pair([one, two], rng)
            steps = [pair.put, pair.put, pair.get, pair.get, pair.get, pair.wait, pair.clear, pair.forget]
            for _ in range(250):
                await rng.choice(steps)()
            assert described(await one.list_rows("p")) == described(await pair.reference.list_rows("p"))
            await pair.forget()
            pair.kept.clear()

    asyncio.run(main())
