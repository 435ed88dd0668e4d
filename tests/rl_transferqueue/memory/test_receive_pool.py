"""`ReceivePool`: memory is used again once no view of it is left, and never before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_transferqueue.memory.receive_pool import ReceivePool

MIB = 1 << 20
_BIG = MIB + 8


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_for_an_array_of_about_the_same_size() -> None:
    pool = ReceivePool()
    first = pool.empty((_BIG,), np.uint8)
    first[:] = 7
    place = _address(first)
    del first
    assert _address(pool.empty((_BIG // 4 + 100,), np.float32)) == place


@pytest.mark.parametrize(
    "keep", [lambda a: a[5:9], memoryview, torch.from_numpy], ids=["slice", "memoryview", "tensor"]
)
def test_memory_that_a_view_refers_to_is_not_used_again(keep: Callable[[np.ndarray], Any]) -> None:
    pool = ReceivePool()
    first = pool.empty((_BIG,), np.uint8)
    first[:] = 7
    place, view = _address(first), keep(first)
    del first
    other = pool.empty((_BIG,), np.uint8)
    assert _address(other) != place
    other[:] = 0
    assert set(np.asarray(view)[:4].tolist()) == {7}


@pytest.mark.parametrize("rows", [0, 1, 3, 50_000, 200_000])
def test_arrays_of_any_size_begin_at_a_multiple_of_64_bytes(rows: int) -> None:
    pool = ReceivePool()
    arrays = [pool.empty((rows, 3), np.float32) for _ in range(3)]
    assert all(array.shape == (rows, 3) and array.dtype == np.float32 for array in arrays)
    assert all(_address(array) % 64 == 0 for array in arrays if rows)


def test_received_memory_is_reused_once_no_view_is_left() -> None:
    buffers = ReceivePool()

    def place(memory: memoryview) -> int:
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])

    first = buffers.take(3 * MIB)
    one, view = place(first), np.frombuffer(first, np.uint8)[5:9]
    second = buffers.take(3 * MIB)
    assert place(second) != one
    del first
    gc.collect()
    assert place(buffers.take(3 * MIB)) not in (one, place(second))
    del view
    gc.collect()
    assert place(buffers.take(4 * MIB)) == one
    del second
    keep = [buffers.take(256 * MIB) for _ in range(5)]
    del keep
    gc.collect()
    assert sum(len(idle) for idle in buffers._idle) <= 512 * MIB
