"""Padding and the left shift, compared with torch's padding and log-probs row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError
from rl_protocol.padding import (
    lengths_of,
    mask_left,
    mask_right,
    pad_batch,
    pad_left,
    pad_right,
    pad_sequences,
    position_ids,
    response_from_nested,
    response_to_nested,
    unpad,
    unpad_batch,
)

pytestmark = pytest.mark.numeric

LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5)
"""(prompt, response) length of each row."""


def nested(rows: list[list[float]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    values = torch.tensor([x for row in rows for x in row], dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def rows_of(tensor: torch.Tensor) -> list[list[float]]:
    assert tensor.is_nested
    assert tensor.layout == torch.jagged
    return [row.tolist() for row in tensor.unbind()]


def ones(lengths: list[int]) -> torch.Tensor:
    return nested([[1] * n for n in lengths], torch.bool)


# --------------------------------------------------------------------------------
# response_from_nested
def test_the_places_that_predict_the_response_by_hand():
    """Prompt 2 and response 3: places 1, 2, 3 of 0..4. Prompt 1 and response 1: place 0."""
    places = nested([[10, 11, 12, 13, 14], [20, 21], [30, 31, 32]])
    assert rows_of(response_from_nested(places, ones([3, 1, 0]))) == [[11, 12, 13], [20], []]


def test_equal_lengths_stay_jagged():
    out = response_from_nested(nested([[1, 2, 3], [4, 5, 6]]), ones([2, 2]))
    assert rows_of(out) == [[1, 2], [4, 5]]
    assert rows_of(response_to_nested(torch.tensor([[1, 2], [3, 4]]), ones([2, 2]))) == [[1, 2], [3, 4]]
    assert rows_of(unpad(torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool))) == [[1, 2]]


def test_further_dimensions_come_along():
    values = torch.arange(10).reshape(5, 2)
    places = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 3, 5]))
    assert rows_of(response_from_nested(places, ones([1, 1]))) == [[[2, 3]], [[6, 7]]]


@given(LENGTHS, st.integers(0, 9))
def test_log_probs_of_responses_equal_those_computed_row_by_row(lengths: list[tuple[int, int]], seed: int):
    """The oracle computes log-probs from each row's own logits, without offsets.

    It applies softmax, gathers the next token, and cuts to the response.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 7, (p + r,), generator=generator) for p, r in lengths]
    logits = [torch.randn(p + r, 7, generator=generator) for p, r in lengths]
    expected = [
        torch.stack([torch.log_softmax(x[t - 1], -1)[i[t]] for t in range(p, p + r)]) if r else torch.zeros(0)
        for (p, r), i, x in zip(lengths, ids, logits, strict=True)
    ]
    flat = torch.cat(logits)
    following = torch.cat([i.roll(-1) for i in ids])
    at_every_place = torch.log_softmax(flat, -1).gather(-1, following[:, None]).squeeze(-1)
    offsets = torch.tensor([0, *(p + r for p, r in lengths)]).cumsum(0)
    places = torch.nested.nested_tensor_from_jagged(at_every_place, offsets=offsets)
    got = response_from_nested(places, ones([r for _, r in lengths]))
    for row, want in zip(got.unbind(), expected, strict=True):
        assert torch.equal(row, want)


def test_gradients_reach_the_places_that_predict():
    values = torch.zeros(5, requires_grad=True)
    places = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 3, 5]))
    response_from_nested(places, ones([2, 1])).values().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(("total", "response", "row"), [([3, 2], [1, 2], 1), ([0], [0], 0), ([2, 1], [3, 0], 0)])
def test_an_empty_prompt_is_an_error_that_names_the_row(total: list[int], response: list[int], row: int):
    places = nested([[0] * n for n in total])
    with pytest.raises(BatchError, match=f"Row {row} has {total[row]} positions for {response[row]} response tokens"):
        response_from_nested(places, ones(response))


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # the strided layout, which we refuse
def test_what_is_no_jagged_tensor_or_has_other_rows_is_refused():
    with pytest.raises(BatchError, match="jagged nested tensor ragged in dimension 1; got a dense tensor"):
        response_from_nested(torch.zeros(2, 3), ones([1, 1]))
    with pytest.raises(BatchError, match="of another layout or ragged dimension"):
        lengths_of(
            torch.nested.nested_tensor_from_jagged(torch.zeros(3, 4), offsets=torch.tensor([0, 4]), jagged_dim=2)
        )
    with pytest.raises(BatchError, match="another layout"):
        lengths_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    holes = torch.nested.narrow(torch.zeros(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    with pytest.raises(BatchError, match=r"without holes; call contiguous\(\)"):
        lengths_of(holes)
    with pytest.raises(BatchError, match="same rows; got 2 and 1"):
        response_from_nested(nested([[1, 2], [3, 4]]), ones([1]))
    with pytest.raises(BatchError, match="same rows; got 2 and 1"):
        response_to_nested(torch.zeros(2, 3), ones([1]))


def test_response_to_nested_by_hand():
    padded = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0]])
    assert rows_of(response_to_nested(padded, ones([2, 1, 0]))) == [[1, 2], [3], []]
    with pytest.raises(BatchError, match="Row 1 has 4 tokens, more than the width 3"):
        response_to_nested(padded, ones([2, 4, 0]))


# --------------------------------------------------------------------------------
# padding
def test_padding_masks_and_positions_by_hand():
    rows = nested([[5, 6], [], [7, 8, 9]])
    assert pad_right(rows, 4, -1).tolist() == [[5, 6, -1, -1], [-1] * 4, [7, 8, 9, -1]]
    assert pad_left(rows, fill=0).tolist() == [[0, 5, 6], [0, 0, 0], [7, 8, 9]]
    assert mask_right(lengths_of(rows), 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert mask_left(lengths_of(rows), 3).tolist() == [[False, True, True], [False] * 3, [True] * 3]
    assert position_ids(mask_left(lengths_of(rows), 4)).tolist() == [[0, 0, 0, 1], [0] * 4, [0, 0, 1, 2]]
    with pytest.raises(BatchError, match="Row 2 has 3 tokens, more than the width 2"):
        pad_left(rows, 2)
    with pytest.raises(BatchError, match=r"bool \[1, 2\]; got torch.int64 \[1, 2\]"):
        unpad(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.int64))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from([(), (2,)]))
def test_right_padding_is_torchs_and_unpadding_undoes_both(lengths: list[int], dims: tuple[int, ...]):
    values = torch.arange(1, sum(lengths) * (2 if dims else 1) + 1, dtype=torch.float32).reshape(sum(lengths), *dims)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    width = max(lengths)
    torchs = torch.nn.utils.rnn.pad_sequence(list(rows.unbind()), batch_first=True, padding_value=-5.0)
    assert torch.equal(pad_right(rows, fill=-5.0), torchs)
    flipped = torch.nn.utils.rnn.pad_sequence([r.flip(0) for r in rows.unbind()], batch_first=True).flip(1)
    assert torch.equal(pad_left(rows), flipped)
    for padded, mask in ((pad_left(rows), mask_left), (pad_right(rows), mask_right)):
        again = unpad(padded, mask(lengths_of(rows), width))
        assert torch.equal(again.values(), values)
        assert torch.equal(lengths_of(again), lengths_of(rows))


def test_a_padded_batch_by_hand():
    batch = pad_batch(nested([[1, 2], [3]]), nested([[7], [8, 9]]), pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 7, 0], [0, 3, 8, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch.response_mask.int().tolist() == [[1, 0], [1, 1]]
    wide = pad_batch(nested([[1]]), nested([[2]]), pad_id=9, prompt_width=2, response_width=3)
    assert wide.input_ids.tolist() == [[9, 1, 2, 9, 9]]
    with pytest.raises(BatchError, match="1 prompts and 2 responses"):
        pad_batch(nested([[1]]), nested([[2], [3]]), pad_id=0)


@given(LENGTHS)
def test_unpad_batch_undoes_pad_batch(lengths: list[tuple[int, int]]):
    prompts = nested([list(range(1, p + 1)) for p, _ in lengths])
    responses = nested([list(range(50, 50 + r)) for _, r in lengths])
    batch = pad_batch(prompts, responses, pad_id=0)
    p, r = unpad_batch(batch)
    assert (rows_of(p), rows_of(r)) == (rows_of(prompts), rows_of(responses))
    assert batch.position_ids.max(1).values.tolist() == [p + r - 1 for p, r in lengths]


def test_padding_can_be_differentiated():
    values = torch.ones(3, requires_grad=True)
    rows = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 2, 3]))
    (pad_left(rows) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 2, 4]


def test_prompts_and_responses_are_joined_and_the_places_before_response_tokens_are_named() -> None:
    """Rows [1 2 | 7] and [3 | 8 9]: the places that predict 7, 8 and 9 are 1, 0 and 1."""
    joined = pad_sequences(
        (torch.tensor([1, 2, 3]), torch.tensor([2, 1])),
        (torch.tensor([7, 8, 9]), torch.tensor([1, 2])),
        multiple=2,
        fill=5,
    )
    assert joined.ids.tolist() == [[1, 2, 7, 5], [3, 8, 9, 5]]
    assert joined.real.tolist() == [[True, True, True, False]] * 2
    assert (joined.row.tolist(), joined.place.tolist()) == ([0, 1, 1], [1, 0, 1])
    none = torch.zeros(0, dtype=torch.int64)
    assert pad_sequences((none, none), (none, none)).ids.shape == (0, 1)
    with pytest.raises(BatchError, match=r"Row 1 has 1 positions for 1 response tokens"):
        pad_sequences((torch.tensor([1]), torch.tensor([1, 0])), (torch.tensor([7, 8]), torch.tensor([1, 1])))
