"""Generation in a batch: other architectures, shared prompts, rows that leave."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric

IDS = {"vocab_size": 14, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "grouped-query attention": lambda: LlamaForCausalLM(LlamaConfig(**IDS, **SMALL, num_key_value_heads=2)),
    "norms of queries and keys": lambda: Qwen3ForCausalLM(
        Qwen3Config(**IDS, **SMALL, num_key_value_heads=4, head_dim=16)
    ),
    "learned positions": lambda: GPT2LMHeadModel(GPT2Config(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "sliding window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **IDS,
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
}
PROMPTS = ((3, 4, 5, 6, 7), (3,), (8, 9, 3))
REQUESTS = [GenerationRequest(uid=f"p{i}", session=s, prompt_ids=PROMPTS[i]) for i in range(3) for s in range(12)]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """Random weights, large enough that the distribution isn't flat."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def generate(engine, requests, **params):
    return asyncio.run(engine.generate(requests, SamplingParams(max_new_tokens=24, **params)))


def alone(model, prompt, response):
    """Log-probs of a response by one forward pass over one sequence, without a cache."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
    return log_probs[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_log_probs_are_those_of_one_pass_over_each_sequence(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    made = generate(HFRolloutEngine(checkpoint), REQUESTS)
    lengths = {len(one.response_ids) for one in made}
    assert len(lengths) > 4  # rows leave the batch at several steps
    for request, one in zip(REQUESTS, made, strict=True):
        expected = np.exp(alone(model, request.prompt_ids, one.response_ids))
        assert np.exp(one.log_probs) == pytest.approx(expected, rel=1e-4)


def test_greedy_tokens_are_those_of_transformers(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    requests = REQUESTS[::12]
    for request, one in zip(requests, generate(HFRolloutEngine(checkpoint), requests, temperature=0), strict=True):
        ids = torch.tensor([request.prompt_ids])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=1
        )
        assert list(one.response_ids) == wanted[0, ids.shape[1] :].tolist()


def test_the_way_of_decoding_changes_no_token(checkpoint, monkeypatch):
    engine = HFRolloutEngine(checkpoint)
    made = generate(engine, REQUESTS)
    monkeypatch.setattr("rl_trainer.rollout.decoding.decodes", lambda model, cache: False)
    for one, other in zip(made, generate(engine, REQUESTS), strict=True):
        assert one.response_ids == other.response_ids
        assert np.exp(one.log_probs) == pytest.approx(np.exp(other.log_probs), rel=1e-4)


def test_a_prompt_is_computed_once_for_all_its_responses(checkpoint):
    engine, rows = HFRolloutEngine(checkpoint), []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, ids, out: rows.append(tuple(ids[0].shape)))
    generate(engine, REQUESTS, ignore_eos=True)
    assert rows == [(3, 5)] + [(36, 1)] * 23


@pytest.mark.parametrize("multiple", [1, 16])
def test_finished_rows_leave_the_batch(checkpoint, monkeypatch, multiple):
    monkeypatch.setattr("rl_trainer.rollout.decoding.row_multiple", lambda device: multiple)
    engine, rows = HFRolloutEngine(checkpoint), []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, ids, out: rows.append(len(ids[0])))
    lengths = np.array([len(one.response_ids) for one in generate(engine, REQUESTS)])
    unfinished = [int((lengths > step).sum()) for step in range(1, lengths.max())]
    for computed, needed in zip(rows[1:], unfinished, strict=True):
        least = needed if needed < multiple else -(-needed // multiple) * multiple
        assert needed <= computed <= least * 32 / 31
    assert all(computed < multiple or computed % multiple == 0 for computed in rows[1:] if computed != len(REQUESTS))
