"""The preallocated cache: what it returns, and which rows move."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rl_trainer.rollout.kv_cache import PreallocatedLayer, keep_rows, new_cache

SLIDING = {"use_sliding_window": True, "sliding_window": 8}


def states(rows, length, first):
    """Keys [rows, 2, length, 3] and values, all different."""
    keys = torch.arange(rows * 2 * length * 3, dtype=torch.float32).reshape(rows, 2, length, 3) + first
    return keys, -keys


def test_it_returns_what_a_layer_that_concatenates_returns():
    ours, plain = PreallocatedLayer(9), DynamicLayer()
    orders = [torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 4, 2]), torch.tensor([2, 1]), torch.tensor([0, 1])]
    prompts = states(2, 4, 0.0)
    for got, wanted in zip(ours.update(*prompts), plain.update(*prompts), strict=True):
        assert torch.equal(got, wanted)
    for step, order in enumerate(orders):
        ours.reorder_cache(order)
        plain.reorder_cache(order)
        token = states(len(order), 1, 1000.0 * (step + 1))
        for got, wanted in zip(ours.update(*token), plain.update(*token), strict=True):
            assert torch.equal(got, wanted)
        assert ours.get_seq_length() == plain.get_seq_length() == 5 + step


def test_tokens_and_leaving_rows_take_no_new_memory():
    layer = PreallocatedLayer(7)
    layer.update(*states(2, 4, 0.0))
    layer.reorder_cache(torch.tensor([0, 1, 1]))
    memory = layer.keys.data_ptr()
    layer.update(*states(3, 1, 100.0))
    layer.reorder_cache(torch.tensor([2]))
    keys, _ = layer.update(*states(1, 1, 200.0))
    assert keys.data_ptr() == memory


@pytest.mark.parametrize(
    ("alive", "order"),
    [([1, 0, 1, 0, 1], [0, 4, 2]), ([1, 1, 0], [0, 1]), ([0, 0, 1, 1], [2, 3]), ([0, 1, 1], [2, 1])],
)
def test_only_rows_behind_the_new_end_move(alive, order):
    assert keep_rows(torch.tensor(alive, dtype=torch.bool)).tolist() == order


def test_only_layers_with_full_attention_are_preallocated():
    config = Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], **SLIDING)
    full, sliding = new_cache(config, 16).layers
    assert isinstance(full, PreallocatedLayer)
    assert isinstance(sliding, DynamicSlidingWindowLayer)
