"""Logits without the tokens that were excluded, against masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_protocol import BatchData, BatchError, KeptSets, ragged
from rl_protocol.kept_tokens import EXCLUDED, KeptTokens

CPU = torch.device("cpu")


def masks(vocabulary, rows=9):
    """Sets of one token, of some, of nearly all and of all tokens."""
    rng = np.random.default_rng(vocabulary)
    mask = rng.random((rows, vocabulary)) < np.array([[0.0], [0.02], [0.5], [0.98], [1.0]])[np.arange(rows) % 5]
    mask[np.arange(rows), rng.integers(0, vocabulary, rows)] = True
    return mask


@pytest.mark.parametrize("vocabulary", [1, 7, 32, 33, 64, 1000])
def test_every_slice_excludes_what_was_not_kept(vocabulary):
    mask = masks(vocabulary)
    kept = KeptTokens(KeptSets.from_mask(mask), CPU)
    for rows in (slice(0, 9), slice(0, 0), slice(3, 4), slice(2, 9), slice(9, 9)):
        assert kept.excluded(rows, vocabulary).numpy().tolist() == (~mask[rows]).tolist()
    scores = torch.randn(9, vocabulary)
    assert torch.equal(kept.restricted(scores), torch.where(torch.from_numpy(mask), scores, EXCLUDED))


def test_a_model_may_have_more_tokens_than_the_one_that_sampled():
    """The padding of vocabularies differs between the sizes of a model."""
    mask = masks(1000)
    excluded = KeptTokens(KeptSets.from_mask(mask), CPU).excluded(slice(0, 9), 1040).numpy()
    assert excluded[:, :1000].tolist() == (~mask).tolist()
    partial = ~mask.all(1)
    assert excluded[partial, 1000:].all()


def test_a_token_beyond_the_vocabulary_is_refused():
    kept = KeptTokens(KeptSets.from_ids([[3], [1, 99]], 1000), CPU)
    with pytest.raises(BatchError, match="has token 99, and the model has 50: the rollout engine has another"):
        kept.excluded(slice(0, 2), 50)


def test_a_batch_without_the_columns_has_no_sets():
    sets = KeptSets.from_ids([[3], [1, 2]], 9)
    columns = {"kept_counts": ragged([sets.counts], "int32"), "kept_words": ragged([sets.words], "int32")}
    of_batch = KeptTokens.of(BatchData(columns), CPU)
    assert of_batch.excluded(slice(0, 2), 9).sum(1).tolist() == [8, 7]
    assert KeptTokens.of(BatchData({}), CPU) is None
