"""Translation of sampling parameters, request seeds, and the log-probs vLLM must report."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError, RolloutError
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_rollout_vllm import request_seed, required_logprobs_mode, sampling_arguments

REQUEST = GenerationRequest(uid="p7", session=3, prompt_ids=(5, 6))


def test_the_whole_translation():
    params = SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9, top_k=50, ignore_eos=True, seed=11)
    assert sampling_arguments(REQUEST, params) == {
        "n": 1,
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "seed": request_seed(11, "p7", 3, 2),
        "ignore_eos": True,
        "stop": [],
        "stop_token_ids": [],
        "logprobs": 0,
        "detokenize": False,
        "logit_bias": None,
    }


def test_tokens_that_are_never_generated_get_the_least_bias():
    got = sampling_arguments(REQUEST, SamplingParams(max_new_tokens=1), (), (3, 8))
    assert got["logit_bias"] == {3: -100.0, 8: -100.0}


def test_defaults_mean_the_same_on_both_sides():
    got = sampling_arguments(REQUEST, SamplingParams(max_new_tokens=1))
    assert (got["temperature"], got["top_p"], got["top_k"], got["ignore_eos"]) == (1.0, 1.0, 0, False)


def test_stop_tokens_end_a_response_unless_they_are_to_be_ignored():
    params = SamplingParams(max_new_tokens=1)
    assert sampling_arguments(REQUEST, params, (1, 7))["stop_token_ids"] == [1, 7]
    ignoring = SamplingParams(max_new_tokens=1, ignore_eos=True)
    assert sampling_arguments(REQUEST, ignoring, (1, 7))["stop_token_ids"] == []


def test_stop_strings_need_text_and_stop_tokens_add_to_those_of_the_model():
    params = SamplingParams(max_new_tokens=1, stop=("</tool_call>", "\n"), stop_token_ids=(9,))
    got = sampling_arguments(REQUEST, params, (1, 7))
    assert (got["stop"], got["detokenize"], got["stop_token_ids"]) == (["</tool_call>", "\n"], True, [1, 7, 9])
    ignoring = SamplingParams(max_new_tokens=1, ignore_eos=True, stop_token_ids=(9,))
    assert sampling_arguments(REQUEST, ignoring, (1, 7))["stop_token_ids"] == [9]


def test_request_seed_by_hand():
    digest = hashlib.blake2b(b"11/3/2/p7", digest_size=8).digest()
    assert request_seed(11, "p7", 3, 2) == int.from_bytes(digest, "little") % 2**63
    assert request_seed(0, "a", 0, 1) == 53002490556032763


SEEDS = st.tuples(st.integers(-(2**63), 2**64), st.text(max_size=5), st.integers(0, 2**40), st.integers(1, 2**20))


@settings(max_examples=20)
@given(st.lists(SEEDS, unique=True, max_size=5))
def test_request_seeds_are_in_range_and_apart(parts: list[tuple[int, str, int, int]]):
    seeds = [request_seed(*p) for p in parts]
    assert all(0 <= s < 2**63 for s in seeds)
    assert len(set(seeds)) == len(parts)
    assert seeds == [request_seed(*p) for p in parts]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 0.005),
        ("temperature", 2.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float):
    params = SamplingParams(**{"max_new_tokens": 4, field: value})
    for call in (lambda: sampling_arguments(REQUEST, params), lambda: required_logprobs_mode(params)):
        with pytest.raises(ConfigError, match=f"Sampling parameter {field} must be .*; got {value!r}") as caught:
            call()
        assert caught.value.field == field


def test_an_empty_prompt_is_named():
    with pytest.raises(RolloutError, match="request 'p7', session 3, has no tokens"):
        sampling_arguments(GenerationRequest(uid="p7", session=3, prompt_ids=()), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({}, None),
        ({"temperature": 0.0, "top_p": 0.5}, None),
        ({"top_p": 0.5, "top_k": 3}, "raw_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"temperature": 1.3}, "processed_logprobs"),
        ({"temperature": 0.7, "top_p": 0.5, "top_k": 3, "kept_sets": True}, "processed_logprobs"),
        ({"kept_sets": True}, None),
        ({"temperature": 0.0, "top_p": 0.5, "kept_sets": True}, None),
    ],
)
def test_which_log_probs_are_needed(params: dict[str, float], mode: str | None):
    assert required_logprobs_mode(SamplingParams(max_new_tokens=4, **params)) == mode


def test_kept_sets_are_read_from_the_log_probs_of_the_top_k_tokens():
    params = SamplingParams(max_new_tokens=4, top_p=0.9, top_k=50, kept_sets=True)
    assert sampling_arguments(REQUEST, params)["logprobs"] == 50
    with pytest.raises(ConfigError, match=r"the tokens that top_p 0\.9 keeps among the top_k .*, and top_k is 0"):
        required_logprobs_mode(SamplingParams(max_new_tokens=4, top_p=0.9, kept_sets=True))


@pytest.mark.parametrize("extra", [{"top_p": 0.9}, {"top_k": 5}])
def test_log_probs_vllm_can_not_report_are_refused(extra: dict[str, float]):
    with pytest.raises(ConfigError, match=r"at temperature 0\.7 before top_p"):
        required_logprobs_mode(SamplingParams(max_new_tokens=4, temperature=0.7, **extra))
