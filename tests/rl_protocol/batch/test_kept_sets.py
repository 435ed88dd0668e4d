"""Kept sets against plain Python sets, and their size."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import KeptSets
from rl_protocol.batch.kept_sets import BITMAP


def decoded(kept, vocabulary):
    """The sets as Python sets, read word by word."""
    out, words = [], kept.words.tolist()
    for count in kept.counts.tolist():
        mine, words = words[:count], words[count:]
        if not mine:
            out.append(set(range(vocabulary)))
        elif mine[0] == BITMAP:
            out.append({32 * i + bit for i, word in enumerate(mine[1:]) for bit in range(32) if word >> bit & 1})
        else:
            out.append(set(mine))
    assert words == []
    return out


@st.composite
def sets_of_a_vocabulary(draw):
    vocabulary = draw(st.integers(1, 200))
    some = st.sets(st.integers(0, vocabulary - 1), min_size=1)
    return vocabulary, draw(st.lists(st.one_of(some, st.just(set(range(vocabulary)))), max_size=6))


def mask_of(vocabulary, sets):
    mask = np.zeros((len(sets), vocabulary), np.bool_)
    for row, ids in enumerate(sets):
        mask[row, list(ids)] = True
    return mask


@settings(deadline=None)
@given(sets_of_a_vocabulary(), st.data())
def test_they_hold_what_was_kept(given_sets, data):
    vocabulary, sets = given_sets
    kept = KeptSets.from_mask(mask_of(vocabulary, sets))
    assert decoded(kept, vocabulary) == sets
    assert (kept.counts.dtype, kept.words.dtype) == (np.int32, np.int32)
    assert decoded(KeptSets.from_ids([list(ids) for ids in sets], vocabulary), vocabulary) == sets
    tokens = [data.draw(st.integers(0, vocabulary - 1)) for _ in sets]
    assert kept.contain(tokens).tolist() == [token in ids for token, ids in zip(tokens, sets, strict=True)]
    first = data.draw(st.integers(0, len(sets)))
    assert decoded(kept.head(first), vocabulary) == sets[:first]
    joined = KeptSets.joined([(len(sets), kept), (2, None), (first, kept.head(first))])
    assert decoded(joined, vocabulary) == [*sets, *[set(range(vocabulary))] * 2, *sets[:first]]


@settings(deadline=None)
@given(sets_of_a_vocabulary())
def test_a_set_takes_a_word_for_each_token_and_a_bit_of_the_vocabulary_at_most(given_sets):
    vocabulary, sets = given_sets
    counts = KeptSets.from_mask(mask_of(vocabulary, sets)).counts.tolist()
    for count, ids in zip(counts, sets, strict=True):
        assert count <= len(ids)
        assert 32 * (count - 1) < vocabulary + 32
        assert (count == 0) == (len(ids) == vocabulary)


def test_where_no_part_has_sets_there_are_none():
    assert KeptSets.joined([(3, None), (0, None)]) is None
    assert KeptSets.joined([]) is None
    assert KeptSets.all_kept(3).contain([5, 6, 7]).tolist() == [True] * 3
