"""Rows are cut into passes."""

from __future__ import annotations

import pytest

from rl_protocol import BatchData, ragged

pytest.importorskip("megatron.core")


def batch_of(*lengths):
    """Rows whose prompts have two tokens and whose rows have so many in all."""
    return BatchData(
        {
            "prompts": ragged([[1, 2]] * len(lengths), "int64"),
            "responses": ragged([[1] * (length - 2) for length in lengths], "int64"),
        }
    )


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ((10, 20, 30), 64),
        ((2048, 10), 8),  # 16,384 tokens
        ((2049, 10), 7),
        ((20000, 10), 1),
        ((), 64),
    ],
)
def test_long_rows_make_passes_without_gradients_smaller(lengths, rows):
    from rl_megatron_peft.backend.train.mini_batches import forward_rows_of

    assert forward_rows_of(batch_of(*lengths), 64) == rows


def test_passes_without_gradients_have_the_tokens_that_are_set():
    from rl_megatron_peft.backend.train.mini_batches import forward_rows_of

    assert [forward_rows_of(batch_of(10, 20, 30), 64, tokens) for tokens in (29, 30, 89, 90)] == [1, 1, 2, 3]


def test_rows_are_divided_in_order():
    from rl_megatron_peft.backend.train.mini_batches import micro_batches_of

    batch = batch_of(3, 4, 5, 6, 7)
    parts = micro_batches_of(batch, [4, 0, 2], 2)
    assert [part.ragged("responses").lengths.tolist() for part in parts] == [[5, 1], [3]]
    (whole,) = micro_batches_of(batch, [4, 0, 2], 0)
    assert whole.ragged("responses").lengths.tolist() == [5, 1, 3]
    assert micro_batches_of(batch, [], 0) == []


@pytest.mark.parametrize(
    ("size", "tokens", "parts"),
    [
        (0, 45, [[3, 9, 4, 8, 5]]),
        (0, 44, [[9, 8, 5, 4], [3]]),
        (0, 16, [[9], [8, 5], [4, 3]]),
        (2, 18, [[3, 9], [4, 8], [5]]),
        (2, 17, [[9], [8, 5], [4, 3]]),
        (0, 5, [[9], [8], [5], [4], [3]]),
        (2, 0, [[3, 9], [4, 8], [5]]),
    ],
)
def test_rows_that_have_too_many_tokens_with_their_padding_are_sorted_and_divided(size, tokens, parts):
    from rl_megatron_peft.backend.train.mini_batches import micro_batches_of

    made = micro_batches_of(batch_of(7, 3, 9, 4, 8, 5), [1, 2, 3, 4, 5], size, tokens)
    assert [(part.ragged("responses").lengths + 2).tolist() for part in made] == parts
