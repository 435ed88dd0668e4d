"""Numbers in messages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_transferqueue.wire.arrays import pack_ints, unpack_ints

NUMBERS = st.lists(st.integers(-(2**62), 2**62), max_size=9)
RUNS = st.builds(range, st.integers(-5, 0), st.integers(0, 9)).map(list)


@given(NUMBERS | RUNS | st.permutations(range(4)))
def test_numbers_are_those_that_were_packed(numbers: list[int]):
    packed = pack_ints(np.array(numbers, np.int64))
    assert unpack_ints(packed, len(numbers)).tolist() == numbers


def test_consecutive_numbers_are_packed_into_one():
    assert pack_ints(np.arange(7, 65_543)) == (7).to_bytes(8, "little")
    assert len(pack_ints(np.array([7, 8, 10]))) == 24
