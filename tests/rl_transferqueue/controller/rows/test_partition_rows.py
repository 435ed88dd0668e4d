"""`PartitionTable`: keys by slot, as rows come and go."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_transferqueue.controller.rows.partition_rows import PartitionTable

KEYS = st.lists(st.integers(0, 12).map(str), min_size=1, max_size=8, unique=True)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=20))
def test_a_table_has_the_rows_that_were_added_and_not_removed(steps: list[tuple[bool, list[str]]]) -> None:
    table, model, numbers = PartitionTable(), dict[str, int](), itertools.count(1, 100)
    for adds, keys in steps:
        if adds:
            first = next(numbers)
            fresh = [key for key in keys if key not in model]
            slots, new = table.add(keys, first)
            assert table.keys(slots) == tuple(keys)
            assert new.tolist() == [key in fresh for key in keys]
            model |= {key: first + number for number, key in enumerate(fresh)}
        else:
            slots, missing = table.find(keys)
            assert missing == [key for key in keys if key not in model]
            table.remove(np.unique(slots))
            for key in keys:
                model.pop(key, None)
        there = table.slots()
        assert dict(zip(table.keys(there), table.generations(there).tolist(), strict=True)) == model
        assert len(table) == len(model)
