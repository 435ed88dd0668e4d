"""Aggregated token losses equal their definition for any split into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.algorithms.losses.aggregate import BatchCounts, add_masked, aggregate
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.config.actor import LOSS_AGG_MODES

pytestmark = pytest.mark.numeric


def slow_aggregate(rows, mode, scale):
    """`rows` holds the unmasked losses of each row."""
    filled = [row for row in rows if row]
    tokens = [x for row in rows for x in row]
    if mode == "token-mean":
        return sum(tokens) / len(tokens) if tokens else 0.0
    if mode == "token-sum":
        return sum(tokens)
    per_row = [sum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in filled]
    mean = sum(per_row) / len(filled) if filled else 0.0
    return mean / scale if mode == "seq-mean-token-sum-norm" else mean


@settings(max_examples=60)
@given(st.data(), st.sampled_from(LOSS_AGG_MODES))
def test_aggregation_equals_the_definition_for_any_split(data, mode):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    loss = [data.draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n)) for n in lengths]
    mask = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    kept = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(loss, mask, strict=True)]
    counts = BatchCounts(tokens=sum(map(len, kept)), sequences=sum(bool(row) for row in kept))
    total = 0.0
    for number in range(4):  # micro-batches or ranks, some of them empty
        part = [i for i, where in enumerate(part_of) if where == number]
        flat = torch.tensor([x for i in part for x in loss[i]], dtype=torch.float64)
        flags = torch.tensor([m for i in part for m in mask[i]], dtype=torch.bool)
        row = torch.tensor([k for k, i in enumerate(part) for _ in loss[i]], dtype=torch.int64)
        total += aggregate(flat, flags, row, len(part), counts, mode, 8).item()
    assert abs(total - slow_aggregate(kept, mode, 8)) <= 1e-14 * sum(abs(x) for row in kept for x in row)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ConfigError, match=r"got 'token-median'\. Did you mean 'token-mean'"):
        aggregate(
            torch.zeros(1),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            1,
            BatchCounts(tokens=1, sequences=1),
            "token-median",
        )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_masked_tokens_get_no_gradient_even_when_not_finite(mode):
    loss = torch.tensor([1.0, float("inf")], requires_grad=True)
    mask = torch.tensor([True, False])
    counts = BatchCounts(tokens=1, sequences=1)
    aggregate(loss, mask, torch.zeros(2, dtype=torch.int64), 1, counts, mode, 1).backward()
    assert loss.grad.tolist() == [1.0, 0.0]


def test_metrics_are_sums_over_unmasked_tokens_of_any_element_type():
    means, mask = WeightedMeans(), torch.tensor([True, False, True, True])
    values = {
        "loss": torch.tensor([1.5, float("nan"), 2.0, -1.0], requires_grad=True),
        "exact": torch.tensor([0.1, 9.0, 0.2, 0.3], dtype=torch.float64),
        "masked": torch.tensor([True, True, False, True]),
    }
    add_masked(means, values, mask)
    add_masked(means, {"loss": torch.tensor([4.0])}, torch.tensor([True]))
    add_masked(means, {"loss": torch.tensor([float("inf")])}, torch.tensor([False]))
    assert means.parts() == {"loss": (6.5, 4.0), "exact": (0.1 + 0.2 + 0.3, 3.0), "masked": (2.0, 3.0)}
