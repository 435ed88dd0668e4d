"""Changes of a tensor: what they contain, their size, and what a reader refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_engine.engines.delta.tensor_changes import compare, decode, encode
from rl_protocol.errors import WeightSyncError

pytestmark = pytest.mark.numeric


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 400),
    flips=st.dictionaries(st.integers(0, 399), st.integers(1, 255), max_size=40),
    gap=st.sampled_from([0, 300, 70_000]),
)
@settings(max_examples=100, deadline=None)
def test_a_change_is_what_differs_and_applying_it_twice_changes_nothing(
    itemsize: int, count: int, flips: dict[int, int], gap: int
) -> None:
    old = np.arange((count + gap) * itemsize, dtype=np.uint8)
    new = old.copy()
    for at, bit in flips.items():
        if at < count:
            new[(at + (gap if at % 2 else 0)) * itemsize] ^= bit
    change = compare(old, new, itemsize)
    differing = sorted(at + (gap if at % 2 else 0) for at in flips if at < count)
    assert change.positions.tolist() == differing
    if not differing:
        return
    again = decode(encode(change), itemsize, count + gap)
    assert again.positions.tolist() == differing
    data = old.copy()
    undo = again.apply(data)
    assert np.array_equal(data, new)
    again.apply(data)
    assert np.array_equal(data, new)
    undo.apply(data)
    assert np.array_equal(data, old)


def test_blobs_that_are_no_change_of_the_tensor_are_refused() -> None:
    blob = encode(compare(np.zeros(40, np.uint8), np.arange(40, dtype=np.uint8), 4))
    for data, itemsize, count in [
        (blob[:5], 4, 10),
        (blob, 2, 20),
        (blob, 4, 9),
        (blob[:-3], 4, 10),
        (blob[:10] + bytes(20), 4, 10),
    ]:
        with pytest.raises(WeightSyncError, match="change"):
            decode(data, itemsize, count)
    forged = bytearray(blob)
    forged[2] = 3  # the length says fewer elements than the data holds
    with pytest.raises(WeightSyncError, match="change"):
        decode(bytes(forged), 4, 10)


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03])
def test_a_change_costs_at_most_its_positions_and_values(share: float) -> None:
    draw = np.random.default_rng(3)
    old = draw.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    at = draw.random(old.size) < share
    new[at] += draw.choice(np.array([1, 65535], np.uint16), int(at.sum()))
    blob = encode(compare(old.view(np.uint8), new.view(np.uint8), 2))
    ideal = int(at.sum()) * 4  # a 16-bit gap and a 16-bit value each
    assert len(blob) <= 1.0 * ideal
    assert len(blob) <= 0.10 * new.nbytes
