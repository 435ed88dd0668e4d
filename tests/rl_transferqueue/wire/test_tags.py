"""Tags keep their values when they are converted to columns and back to rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, Tag
from rl_transferqueue.wire.tags import to_columns, to_rows

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=2))
TAGS = st.lists(st.dictionaries(st.sampled_from("abcde"), SCALARS, max_size=5), max_size=6)


@given(TAGS, st.integers(0, 5))
def test_there_and_back(tags: list[Tag], shared: int) -> None:
    """Some tags are in every row, others only in a few; values keep their types."""
    tags = [{**{f"s{i}": i for i in range(shared)}, **tag} for tag in tags]
    rows = to_rows(to_columns([str(i) for i in range(len(tags))], tags), len(tags))
    assert list(rows) == tags
    assert [[type(v) for _, v in sorted(r.items())] for r in rows] == [
        [type(v) for _, v in sorted(t.items())] for t in tags
    ]
    assert len({id(row) for row in rows}) == len(rows)


def test_what_no_tag_may_be_is_named() -> None:
    with pytest.raises(BatchError, match=r"'t' of row 'b'.*\[1\]"):
        to_columns(["a", "b"], [{"t": 1}, {"t": [1]}])  # type: ignore[dict-item]
    with pytest.raises(BatchError, match="'t' of row 'b' is NaN"):
        to_columns(["a", "b"], [{"t": 1.0}, {"t": float("nan")}])
    with pytest.raises(BatchError, match=r"'t' of row 'a'.*int64"):
        to_columns(["a", "b"], [{"t": np.int64(1)}, {"t": 1}])  # type: ignore[dict-item]
