"""Padding and the places that predict responses, compared with torch's padding and row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, ragged
from rl_protocol.padding import mask_left, mask_right, pad_sequences, position_ids, response_places

pytestmark = pytest.mark.numeric

LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5)
"""(prompt, response) length of each row."""


# --------------------------------------------------------------------------------
# response_places
def test_the_places_that_predict_the_response_by_hand():
    """Prompt 2, response 3: places 1, 2, 3 of 0..4. Prompt 1, response 1: place 5 of 5..6."""
    assert response_places(torch.tensor([5, 2, 3]), torch.tensor([3, 1, 0])).tolist() == [1, 2, 3, 5]


@given(LENGTHS, st.integers(0, 9))
def test_log_probs_of_responses_equal_those_computed_row_by_row(lengths: list[tuple[int, int]], seed: int):
    """The oracle computes log-probs from each row's own logits, without offsets.

    It applies softmax, gathers the next token, and cuts to the response.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 7, (p + r,), generator=generator) for p, r in lengths]
    logits = [torch.randn(p + r, 7, generator=generator) for p, r in lengths]
    expected = [
        torch.log_softmax(x[t - 1], -1)[i[t]]
        for (p, r), i, x in zip(lengths, ids, logits, strict=True)
        for t in range(p, p + r)
    ]
    following = torch.cat([i.roll(-1) for i in ids])
    at_every_place = torch.log_softmax(torch.cat(logits), -1).gather(-1, following[:, None]).squeeze(-1)
    p, r = torch.tensor(lengths).T
    assert at_every_place[response_places(p + r, r)].tolist() == [float(value) for value in expected]


@pytest.mark.parametrize(("total", "response", "row"), [([3, 2], [1, 2], 1), ([0], [0], 0), ([2, 1], [3, 0], 0)])
def test_an_empty_prompt_is_an_error_that_names_the_row(total: list[int], response: list[int], row: int):
    with pytest.raises(BatchError, match=f"Row {row} has {total[row]} positions for {response[row]} response tokens"):
        response_places(torch.tensor(total), torch.tensor(response))


# --------------------------------------------------------------------------------
# masks and positions
def test_masks_and_positions_by_hand():
    lengths = torch.tensor([2, 0, 3])
    assert mask_right(lengths, 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert mask_left(lengths, 3).tolist() == [[False, True, True], [False] * 3, [True] * 3]
    assert position_ids(mask_left(lengths, 4)).tolist() == [[0, 0, 0, 1], [0] * 4, [0, 0, 1, 2]]


# --------------------------------------------------------------------------------
# pad_sequences
def test_prompts_and_responses_are_joined_and_the_places_before_response_tokens_are_named() -> None:
    """Rows [1 2 | 7] and [3 | 8 9]: the places that predict 7, 8 and 9 are 1, 0 and 1."""
    joined = pad_sequences(ragged([[1, 2], [3]], "int64"), ragged([[7], [8, 9]], "int64"), multiple=2, fill=5)
    assert joined.ids.tolist() == [[1, 2, 7, 5], [3, 8, 9, 5]]
    assert joined.real.tolist() == [[True, True, True, False]] * 2
    assert (joined.row.tolist(), joined.place.tolist()) == ([0, 1, 1], [1, 0, 1])
    assert joined.targets.tolist() == [7, 8, 9]
    assert pad_sequences(ragged([], "int64"), ragged([], "int64")).ids.shape == (0, 1)
    with pytest.raises(BatchError, match=r"Row 1 has 1 positions for 1 response tokens"):
        pad_sequences(ragged([[1], []], "int64"), ragged([[7], [8]], "int64"))


@given(LENGTHS, st.integers(1, 4))
def test_joined_rows_are_padded_like_torchs(lengths: list[tuple[int, int]], multiple: int):
    """Each response token follows the place that predicts it."""
    prompts = [list(range(1, p + 1)) for p, _ in lengths]
    responses = [list(range(50, 50 + r)) for _, r in lengths]
    joined = pad_sequences(ragged(prompts, "int64"), ragged(responses, "int64"), multiple=multiple, fill=-5)
    whole = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    torchs = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=-5)
    longest = torchs.shape[1]
    assert joined.ids.shape[1] in range(longest, longest + multiple)
    assert joined.ids.shape[1] % multiple == 0
    assert torch.equal(joined.ids[:, :longest], torchs)
    assert torch.equal(joined.real, joined.ids != -5)
    assert torch.equal(joined.ids[joined.row, joined.place + 1], joined.targets)
    assert joined.targets.tolist() == [token for response in responses for token in response]
