"""KVBatchMeta: operations keep every key, tag and generation."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchData, BatchError, KVBatchMeta, LazyRows, Partitionable, Tag, UnknownNameError, dense

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
FACTS = st.dictionaries(st.sampled_from(["temperature", "version"]), SCALARS)


@st.composite
def metas(draw: st.DrawFn) -> KVBatchMeta:
    keys = draw(st.lists(st.text(max_size=3), unique=True, max_size=8))
    tagged = draw(st.booleans())
    tags = [{"i": i, "status": draw(SCALARS)} for i in range(len(keys))] if tagged else []
    return KVBatchMeta(partition="train", keys=tuple(keys), tags=tuple(tags), fields=("a", "b"), extra_info=draw(FACTS))


def make(*keys: str, **more: object) -> KVBatchMeta:
    return KVBatchMeta(partition="train", keys=keys, **more)  # type: ignore[arg-type]


@given(metas(), st.integers(1, 10))
def test_chunk_then_concat_gives_the_same_metadata(meta: KVBatchMeta, parts: int):
    chunks = meta.chunk(parts)
    assert len(chunks) == parts
    assert KVBatchMeta.concat(chunks) == meta
    assert all(c.extra_info == meta.extra_info and c.fields == meta.fields for c in chunks)


@given(metas(), st.data())
def test_selection_keeps_each_tag_with_its_key(meta: KVBatchMeta, data: st.DataObject):
    tag_of = dict(zip(meta.keys, meta.tags or [{}] * len(meta), strict=True))
    order = data.draw(st.permutations(range(len(meta))))
    for part in (meta.reorder(order), meta.select_keys([meta.keys[i] for i in order])):
        assert part.keys == tuple(meta.keys[i] for i in order)
        assert list(part.tags) == ([tag_of[k] for k in part.keys] if meta.tags else [])
    start = data.draw(st.integers(0, len(meta)))
    assert meta.slice(start, len(meta)).keys == meta.keys[start:]


def test_selection_keeps_each_generation_with_its_key():
    """Otherwise a row that was put again could be mistaken for the cleared one."""
    meta = KVBatchMeta(partition="p", keys=("a", "b", "c"), generations=(7, 8, 9))
    assert meta.select_rows([2, 0]).generations == (9, 7)
    assert meta.select_keys(["b", "a"]).generations == (8, 7)
    assert meta.slice(1, 3).generations == (8, 9)
    assert KVBatchMeta.concat([meta.slice(2, 3), meta.slice(0, 2)]).generations == (9, 7, 8)


@given(metas(), st.integers(1, 4))
def test_balanced_split_holds_every_key_once(meta: KVBatchMeta, parts: int):
    split = meta.split_balanced(list(range(len(meta))), parts)
    assert len(split) == parts
    assert sorted(k for part in split for k in part.keys) == sorted(meta.keys)


def test_tag_values():
    meta = make("a", "b", tags=({"n": 1}, {"n": 2, "m": 0}))
    assert meta.tag_values("n") == [1, 2]
    with pytest.raises(UnknownNameError, match="Row 'a' has no tag 'm'"):
        meta.tag_values("m")
    with pytest.raises(UnknownNameError, match="Row 'a' has no tag 'n'"):
        meta.without_tags().tag_values("n")
    assert make().tag_values("n") == []


def test_union_joins_tags_fields_and_facts():
    left = make("a", "b", tags=({"n": 1}, {"n": 2}), fields=("x",), extra_info={"t": 1.0})
    right = make("a", "b", tags=({"m": 3}, {"n": 2}), fields=("x", "y"), extra_info={"v": 7})
    both = left.union(right)
    assert both.tags == ({"n": 1, "m": 3}, {"n": 2})
    assert both.fields == ("x", "y")
    assert both.extra_info == {"t": 1.0, "v": 7}
    assert left.without_tags().union(right).tags == right.tags
    assert make("a").union(make("a")).tags == ()


def test_union_conflicts_are_errors():
    left = make("a", "b", tags=({"n": 1}, {"n": 2}), extra_info={"t": 1.0})
    with pytest.raises(BatchError, match="'n' of row 'b' is 2 in one batch and 3 in the other"):
        left.union(make("a", "b", tags=({"n": 1}, {"n": 3})))
    with pytest.raises(BatchError, match=r"'t' of extra_info is 1.0 in one batch and 0.5"):
        left.union(make("a", "b", extra_info={"t": 0.5}))
    with pytest.raises(BatchError, match="same keys in the same order"):
        left.union(make("b", "a"))
    with pytest.raises(BatchError, match="same partition"):
        left.union(KVBatchMeta(partition="val", keys=("a", "b")))


def test_concat_conflicts_are_errors():
    with pytest.raises(BatchError, match="at least one part"):
        KVBatchMeta.concat([])
    with pytest.raises(BatchError, match="Part 1 differs from part 0"):
        KVBatchMeta.concat([make("a"), KVBatchMeta(partition="val", keys=("b",))])
    with pytest.raises(BatchError, match="Part 1 differs"):
        KVBatchMeta.concat([make("a", fields=("x",)), make("b")])
    with pytest.raises(BatchError, match="Part 1 differs"):
        KVBatchMeta.concat([make("a", extra_info={"v": 1}), make("b", extra_info={"v": 2})])
    with pytest.raises(BatchError, match="Some parts have tags"):
        KVBatchMeta.concat([make("a", tags=({"n": 1},)), make("b")])
    with pytest.raises(BatchError, match="'a' occurs more than once"):
        KVBatchMeta.concat([make("a"), make("a")])


def test_unknown_names_are_errors():
    meta = make("a", "b", fields=("x",))
    assert meta.select_fields(["x"]).fields == ("x",)
    with pytest.raises(UnknownNameError, match="2 keys not in this batch of partition 'train', the first is 'c'"):
        meta.select_keys(["a", "c", "d"])
    with pytest.raises(UnknownNameError, match="No column 'y'"):
        meta.select_fields(["x", "y"])
    with pytest.raises(UnknownNameError, match="none that are known"):
        make("a").select_fields(["y"])
    with pytest.raises(UnknownNameError, match="Row 2"):
        meta.select_rows([2])


def test_keys_are_unique_and_tags_complete():
    with pytest.raises(BatchError, match="'b' occurs more than once"):
        make("a", "b", "b")
    with pytest.raises(BatchError, match="2 keys, 1 tag"):
        make("a", "b", tags=({"n": 1},))
    with pytest.raises(BatchError, match="more than once"):
        make("a", "b").select_rows([0, 0])


def test_it_is_frozen_and_pickles():
    tags: tuple[Tag, ...] = ({"n": 1},)
    meta = make("a", tags=tags, extra_info={"v": 1})
    with pytest.raises(AttributeError):
        meta.keys = ()  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert bool(meta)
    assert not make()


def test_data_and_metadata_are_partitionable():
    assert isinstance(make("a"), Partitionable)
    assert isinstance(BatchData({"x": dense([1])}), Partitionable)
    assert not isinstance([1], Partitionable)


def test_lazy_rows_are_the_tuple_they_stand_for() -> None:
    made: list[int] = []

    def make() -> tuple[Tag, ...]:
        made.append(1)
        return {"n": 1}, {"n": 2}, {}

    tags = LazyRows(3, make)
    lazy = KVBatchMeta(partition="p", keys=("a", "b", "c"), tags=tags, generations=(1, 2, 3))
    assert (len(tags), bool(lazy.tags), made) == (3, True, [])
    eager = KVBatchMeta(partition="p", keys=("a", "b", "c"), tags=({"n": 1}, {"n": 2}, {}), generations=(1, 2, 3))
    assert lazy == eager
    assert eager == lazy
    assert lazy.select_rows([2, 0]) == eager.select_rows([2, 0])
    assert KVBatchMeta.concat(lazy.chunk(2)) == lazy.union(eager) == eager
    assert (tags[-1], tags[:2], list(tags), repr(tags)) == ({}, eager.tags[:2], list(eager.tags), repr(eager.tags))
    assert tags != ({"n": 1},)
    assert tags != [*tags]  # as with tuples
    again = pickle.loads(pickle.dumps(lazy))
    assert type(again.tags) is tuple
    assert again == lazy
    assert made == [1]
    assert hash(LazyRows(2, lambda: (5, 6))) == hash((5, 6))  # as the tuple, which is a key of caches


def test_a_meta_without_tags_crosses_msgspec_with_generations_that_can_be_hashed() -> None:
    meta = KVBatchMeta(
        partition="p", keys=("a", "b"), tags=LazyRows(2, lambda: ({}, {})), generations=LazyRows(2, lambda: (5, 6))
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(meta.without_tags()), type=KVBatchMeta)
    assert again == meta.without_tags()
    assert hash(again.generations) == hash((5, 6))


def test_lists_of_names_are_taken_and_one_string_is_refused():
    meta = KVBatchMeta(partition="p", keys=["a", "b"], fields=["x"])  # type: ignore[arg-type]
    assert meta == KVBatchMeta(partition="p", keys=("a", "b"), fields=("x",))
    assert KVBatchMeta.concat(meta.chunk(2)) == meta
    for names in ({"keys": "ab"}, {"keys": ("a",), "fields": "xy"}):
        with pytest.raises(BatchError, match=r"must be a tuple; got one string, '(ab|xy)'"):
            KVBatchMeta(partition="p", **names)  # type: ignore[arg-type]
