"""RowKey: order and text form."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, RowKey

UIDS = st.text(min_size=1, max_size=6).filter(lambda text: "/" not in text)
PARTS = st.tuples(UIDS, st.integers(0, 10**12), st.integers(0, 10**12))


@given(PARTS)
def test_text_form_round_trips(parts: tuple[str, int, int]):
    key = RowKey(*parts)
    assert key.text == "/".join(map(str, parts))
    assert RowKey.parse(key.text) == key
    assert pickle.loads(pickle.dumps(key)) == key


@given(st.lists(PARTS, max_size=6))
def test_order_is_that_of_tuples(parts: list[tuple[str, int, int]]):
    keys = sorted(RowKey(*p) for p in parts)
    assert [(k.uid, k.session, k.index) for k in keys] == sorted(parts)
    assert len({RowKey(*p) for p in parts}) == len(set(parts))


def test_numbers_are_compared_as_numbers():
    assert RowKey("p", 2) < RowKey("p", 10)
    assert RowKey("p", 1, 9) < RowKey("p", 1, 10) < RowKey("p", 2, 0)
    assert RowKey("p", 1) == RowKey("p", 1, 0)
    with pytest.raises(TypeError):
        assert RowKey("p", 1) < 3  # type: ignore[operator]


@given(st.text(max_size=12))
def test_whatever_parses_is_canonical(text: str):
    try:
        key = RowKey.parse(text)
    except BatchError:
        return
    assert key.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p",
        "p/1",
        "p/1/2/3",
        "/1/2",
        "p//2",
        "p/01/2",
        "p/1/-2",
        "p/+1/2",
        "p/1 /2",
        "p/1/2 ",
        "p/1.0/2",
        "p/¹/2",
        "p/١/2",
        "p/1/" + "9" * 5000,
    ],
)
def test_other_texts_are_refused(text: str):
    with pytest.raises(BatchError, match=r"Not a row key|must be non-empty"):
        RowKey.parse(text)


def test_parts_are_checked_and_frozen():
    for bad in (("", 0, 0), ("a/b", 0, 0), ("a", -1, 0), ("a", 0, -1), ("a", 10**18, 0)):
        with pytest.raises(BatchError):
            RowKey(*bad)
    with pytest.raises(AttributeError):
        RowKey("a", 0).uid = "b"  # type: ignore[misc]
