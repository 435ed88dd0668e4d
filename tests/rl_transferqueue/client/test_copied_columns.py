"""Copies of a get serve the gets of the same rows that follow, and never after the rows change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from rl_protocol import BatchData, KVBatchMeta, dense
from rl_protocol.torch import to_tensor
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.client.copied_columns import CopiedColumns
from rl_transferqueue.client.location_cache import Location
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.wire.messages import Located
from rl_transferqueue.wire.spans import BlockRef, Span

ROWS, WIDTH = 8, 4096
"""Two blocks of four rows; a column of eight rows has 256 KiB."""
MIXED = (5, 0, 7, 2)
"""Rows of both blocks, so that a get copies them."""
PLANES = {
    "shared memory": TransferQueueConfig(capacity_mb=16, segment_mb=1),
    "tcp": TransferQueueConfig(capacity_mb=16, segment_mb=1, listen="127.0.0.2", shared_memory=False),
    "no cache": TransferQueueConfig(capacity_mb=16, segment_mb=1, read_cache_mb=0),
}


@pytest.fixture(scope="module", params=PLANES)
def any_plane(request: pytest.FixtureRequest) -> Iterator[tuple[str, LocalPlane]]:
    with start_local_plane(PLANES[request.param]) as plane:
        yield request.param, plane


async def _put_two_blocks(client: Client, offset: float = 0.0, column: str = "x") -> KVBatchMeta:
    keys = [str(row) for row in range(ROWS)]
    values = np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH) + offset
    for part in (slice(0, 4), slice(4, 8)):
        await client.put("p", keys[part], BatchData({column: dense(values[part])}))
    return KVBatchMeta(partition="p", keys=tuple(keys[row] for row in MIXED))


def _values(batch: BatchData, column: str = "x") -> np.ndarray:
    return np.asarray(batch[column].buffers[0])


def _expected(offset: float = 0.0) -> np.ndarray:
    return (np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH) + offset)[list(MIXED)]


def test_a_second_get_of_the_same_rows_returns_the_copy_of_the_first(any_plane: tuple[str, LocalPlane]) -> None:
    name, plane = any_plane

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            meta = await _put_two_blocks(client)
            first = await client.get(meta, ["x"])
            await _put_two_blocks(client, 0.5, "y")
            both = await client.get(meta, ["y", "x"])
            assert both.field_names == ("y", "x")
            np.testing.assert_array_equal(_values(both), _expected())
            np.testing.assert_array_equal(_values(both, "y"), _expected(0.5))
            assert np.shares_memory(_values(first), _values(both)) is (name != "no cache")
            other = await client.get(meta.select_keys(meta.keys[:3]), ["x"])
            np.testing.assert_array_equal(_values(other), _expected()[:3])
            assert not np.shares_memory(_values(first), _values(other))
            await client.clear("p")

    asyncio.run(main())


def test_a_column_that_is_written_again_is_read_again(any_plane: tuple[str, LocalPlane]) -> None:
    async def main() -> None:
        async with await connect(any_plane[1].descriptor) as client, await connect(any_plane[1].descriptor) as writer:
            meta = await _put_two_blocks(writer)
            np.testing.assert_array_equal(_values(await client.get(meta, ["x"])), _expected())
            await _put_two_blocks(writer, 0.25)
            np.testing.assert_array_equal(_values(await client.get(meta, ["x"])), _expected(0.25))
            await writer.clear("p")
            await _put_two_blocks(writer, 0.125)
            np.testing.assert_array_equal(_values(await client.get(meta, ["x"])), _expected(0.125))
            await writer.clear("p")

    asyncio.run(main())


def test_writes_to_tensors_of_a_copy_are_not_seen_by_others(any_plane: tuple[str, LocalPlane]) -> None:
    async def main() -> None:
        async with await connect(any_plane[1].descriptor) as client:
            meta = await _put_two_blocks(client)
            for _ in range(2):
                to_tensor(_values(await client.get(meta, ["x"])), "float64").zero_()
            np.testing.assert_array_equal(_values(await client.get(meta, ["x"])), _expected())
            await client.clear("p")

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------
# the cache alone


def _location(blocks: list[int], rows: list[int], ids: tuple[int, ...] = (11, 12)) -> Location:
    refs = tuple(BlockRef(number, Span(0, 4096 * number, 4096), number) for number in ids)
    places = ((np.array(blocks, "<i4").tobytes(), np.array(rows, "<i4").tobytes()),)
    located = Located(refs, np.zeros(len(ids), "<i8").tobytes(), (b"",), (0,) * len(ids), places, (0,))
    return Location(located, Anchor())


def _batch(value: float, kib: int = 64) -> BatchData:
    return BatchData({"x": dense(np.full((2, kib << 6), value))})  # 2 rows of kib / 2 KiB


def test_views_and_small_columns_are_not_kept() -> None:
    copies = CopiedColumns(1 << 20, views=lambda _: True)
    adjacent, scattered = _location([0, 0], [3, 4]), _location([0, 1], [3, 4])
    copies.keep(adjacent, _batch(1.0))
    copies.keep(scattered, _batch(2.0, kib=63))
    assert copies.find(adjacent, ["x"]) == copies.find(scattered, ["x"]) == {}
    copies.keep(scattered, _batch(3.0))
    assert list(copies.find(scattered, ["x"])) == ["x"]
    assert copies.find(scattered, ["y"]) == copies.find(_location([0, 1], [3, 5]), ["x"]) == {}


def test_where_every_read_copies_adjacent_rows_are_kept_too() -> None:
    copies = CopiedColumns(1 << 20, views=lambda _: False)
    copies.keep(_location([0, 0], [3, 4]), _batch(1.0))
    assert list(copies.find(_location([0, 0], [3, 4]), ["x"])) == ["x"]


def test_the_same_rows_are_found_when_another_get_numbers_their_blocks_otherwise() -> None:
    copies = CopiedColumns(1 << 20, views=lambda _: True)
    copies.keep(_location([0, 1], [3, 4], ids=(11, 12)), _batch(1.0))
    assert list(copies.find(_location([1, 2], [3, 4], ids=(7, 11, 12)), ["x"])) == ["x"]
    assert copies.find(_location([0, 1], [3, 4], ids=(12, 11)), ["x"]) == {}


def test_the_copies_used_last_are_kept_within_the_limit() -> None:
    copies = CopiedColumns(128 << 10, views=lambda _: True)
    places = [_location([0, 1], [row, row]) for row in range(3)]
    copies.keep(places[0], _batch(0.0))
    copies.keep(places[1], _batch(1.0))
    copies.find(places[0], ["x"])
    copies.keep(places[2], _batch(2.0))
    assert [bool(copies.find(place, ["x"])) for place in places] == [True, False, True]
    copies.keep(places[1], _batch(3.0, kib=129))
    assert [bool(copies.find(place, ["x"])) for place in places] == [True, False, True]


def test_forgotten_blocks_take_their_copies_along() -> None:
    copies = CopiedColumns(1 << 20, views=lambda _: True)
    one, two = _location([0, 1], [0, 0], ids=(1, 2)), _location([0, 1], [0, 0], ids=(3, 4))
    copies.keep(one, _batch(1.0))
    copies.keep(two, _batch(2.0))
    copies.forget_blocks([2, 9])
    assert [bool(copies.find(place, ["x"])) for place in (one, two)] == [False, True]
    copies.clear()
    assert copies.find(two, ["x"]) == {}
