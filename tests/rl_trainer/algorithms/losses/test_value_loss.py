"""The clipped value loss against values computed by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from rl_protocol import BatchData, ragged
from rl_trainer.algorithms.batching import split_over_ranks
from rl_trainer.algorithms.losses.value_loss import value_fit, value_loss
from rl_trainer.config.optim import Schedule

pytestmark = pytest.mark.numeric


def test_value_loss_by_hand():
    loss, clipped = value_loss(torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), 0.5)
    # V = 1 counts as 0.5, the bound of its clip range; V = 0.1 is within the range
    assert loss.tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.81])
    assert clipped.tolist() == [True, False]


def test_the_explained_variance_does_not_depend_on_the_ranks():
    """With two epochs a row can be on one rank and then on the other."""
    rng = np.random.default_rng(0)
    lengths, ranks = rng.integers(1, 9, 12), 2
    batch = BatchData(
        {
            "response_mask": ragged([[True] * n for n in lengths], "bool"),
            "values": ragged([rng.normal(size=n).tolist() for n in lengths], "float32"),
            "returns": ragged([rng.normal(size=n).tolist() for n in lengths], "float32"),
        }
    )
    values, returns = (batch.ragged(name).values.astype(float) for name in ("values", "returns"))
    expected = 1 - np.var(returns - values) / np.var(returns)

    parts = split_over_ranks(lengths, Schedule(epochs=2, mini_batch_rows=4, seed=0), 0, ranks)
    assert sum(len(part.rows) for part in parts) > len(batch)
    sent, met = [[0.0]] * ranks, Barrier(ranks)

    def fit(rank):
        def total(numbers):
            sent[rank] = list(numbers)
            met.wait(timeout=60)
            sums = [sum(column) for column in zip(*sent, strict=True)]
            met.wait(timeout=60)
            return sums

        part = parts[rank]
        return value_fit(batch.select_rows(part.rows), part.mini_batches, total)

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(fit, range(ranks)))
    assert found == [{"critic/vf_explained_var": pytest.approx(expected)}] * ranks
    whole = value_fit(batch, [list(range(12))])
    assert whole == {"critic/vf_explained_var": pytest.approx(expected)}
