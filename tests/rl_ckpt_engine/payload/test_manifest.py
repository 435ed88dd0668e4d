"""Manifest: layout, encoding, and the checks of a reader."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_engine import Manifest, TensorEntry, plan
from rl_ckpt_engine.payload.digests import tensor_digest
from rl_ckpt_engine.payload.manifest import payload_size
from rl_ckpt_engine.testing import make_weights
from rl_protocol.batch.dtypes import STORAGE_DTYPES
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError

shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=12)


def entries_of(weights: list[WeightTensor]) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(w.name, w.dtype, w.shape, offset, w.nbytes, tensor_digest(w.data.data))
        for w, offset in plan(weights)
    )


def manifest_of(weights: list[WeightTensor], **changes: Any) -> Manifest:
    entries = entries_of(weights)
    fields: dict[str, Any] = {
        "version": 3,
        "sync_id": bytes(range(16)),
        "engine": "shm",
        "tensors": entries,
        "payload_nbytes": payload_size(entries),
        "sender": b"s",
        "placement": b"p",
    }
    return Manifest(**{**fields, **changes})


@given(shapes, st.sampled_from(sorted(STORAGE_DTYPES)))
def test_plan_is_aligned_ordered_without_overlap_and_passes_the_checks(dims: list[tuple[int, ...]], dtype: str) -> None:
    weights = make_weights(dims, dtype=dtype)
    planned = list(plan(weights))
    assert [w for w, _ in planned] == weights
    end = 0
    for weight, offset in planned:
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + weight.nbytes
    manifest = manifest_of(weights).sealed()
    assert manifest.payload_nbytes == end
    assert manifest.tensor_nbytes == sum(w.nbytes for w in weights)
    assert Manifest.decode(manifest.encode()) == manifest


@given(shapes)
def test_layout_depends_on_sizes_alone(dims: list[tuple[int, ...]]) -> None:
    one, other = make_weights(dims, seed=1), make_weights(dims, seed=2)
    assert [offset for _, offset in plan(one)] == [offset for _, offset in plan(other)]


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, flip: int) -> None:
    data = bytearray(manifest_of(make_weights([(3,), (), (0,)])).sealed().encode())
    data[position % len(data)] ^= flip
    with pytest.raises(WeightSyncError):
        Manifest.decode(bytes(data))


@given(st.binary(max_size=200))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(WeightSyncError):
        Manifest.decode(data)


def test_plan_takes_a_source_lazily() -> None:
    taken: list[str] = []

    def source():
        for weight in make_weights([(1,), (2,)]):
            taken.append(weight.name)
            yield weight

    planned = plan(source())
    next(planned)
    assert taken == ["w0"]


def test_duplicate_names_are_refused_by_plan_and_reader() -> None:
    weights = make_weights([(2,)])
    with pytest.raises(WeightSyncError, match="'w0' occurs twice"):
        list(plan(weights * 2))
    first = entries_of(weights)[0]
    twin = msgspec.structs.replace(first, offset=64)
    with pytest.raises(WeightSyncError, match="'w0' occurs twice"):
        manifest_of([], tensors=(first, twin), payload_nbytes=64 + first.nbytes).sealed()


def test_tied_memory_under_two_names_is_fine() -> None:
    data = np.arange(8, dtype=np.uint8)
    tied = [WeightTensor("a", "uint8", (8,), data), WeightTensor("b", "uint8", (8,), data)]
    assert manifest_of(tied).sealed().tensor_nbytes == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 32}, "no multiple of 64"),
        ({"offset": -64}, "before the end"),
        ({"offset": 64}, "beyond the payload"),
        ({"nbytes": 7}, "takes 8 bytes"),
        ({"dtype": "float8_e5m2"}, "takes 2 bytes"),
        ({"dtype": "complex64"}, "Unknown element type"),
        ({"shape": (3,)}, "takes 12 bytes"),
        ({"shape": (-1, -2)}, "impossible shape"),
        ({"digest": b"short"}, "digest of 5 bytes"),
    ],
)
def test_entries_that_can_not_be_are_refused(change: dict[str, Any], message: str) -> None:
    entry = msgspec.structs.replace(entries_of(make_weights([(2,)]))[0], **change)
    with pytest.raises(WeightSyncError, match=message):
        manifest_of([], tensors=(entry,), payload_nbytes=8).sealed()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": -1}, "versions run from 0"),
        ({"version": 2**63}, "versions run from 0"),
        ({"sync_id": b""}, "sync_id has 0 bytes"),
        ({"payload_nbytes": 100}, "payload at 100"),
    ],
)
def test_manifests_that_can_not_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        manifest_of(make_weights([(2,)]), **change).sealed()


def test_overlap_is_refused() -> None:
    first, second = entries_of(make_weights([(100,), (2,)]))
    with pytest.raises(WeightSyncError, match="before the end of its predecessor"):
        manifest_of([], tensors=(first, msgspec.structs.replace(second, offset=64)), payload_nbytes=400).sealed()


def test_unknown_fields_are_refused() -> None:
    fields = msgspec.to_builtins(manifest_of([]).sealed(), builtin_types=(bytes,))
    with pytest.raises(WeightSyncError, match="unknown field"):
        Manifest.decode(msgspec.msgpack.encode({**fields, "extra": 1}))


def test_missing_digest_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="digest does not fit"):
        Manifest.decode(manifest_of(make_weights([(2,)])).encode())


def test_element_count_may_exceed_64_bits_without_overflow() -> None:
    entry = TensorEntry("huge", "uint8", (2**32, 2**32), 0, 0, bytes(16))
    with pytest.raises(WeightSyncError, match=str(math.prod(entry.shape))):
        manifest_of([], tensors=(entry,), payload_nbytes=0).sealed()
