"""Stop strings: the token that completes one, while tokens come and afterwards; the text before."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from rl_protocol import ConfigError
from rl_protocol.ports import Generation, GenerationRequest, SamplingParams
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.partial_generation import generate_turn
from rl_trainer.rollout.stop_strings import StopSearch, text_until_stop, tokens_until_stop

WORDS = ["a", "b", "ab", "ba!", "!!", " a", " b"]


def words(ids):
    return "".join(WORDS[i] for i in ids)


def first_end(ids, stops):
    """By definition: the shortest prefix whose text has one of the strings."""
    return next((n for n in range(1, len(ids) + 1) if any(stop in words(ids[:n]) for stop in stops)), None)


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=12),
    st.lists(st.text("ab! ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
)
def test_both_searches_find_the_token_that_completes_a_string(ids, stops, context):
    search = StopSearch(stops, words, context)
    found = next((n for n, token in enumerate(ids, 1) if search.completed_by(token)), None)
    assert found == tokens_until_stop(ids, words, stops) == first_end(ids, stops)


def byte_level():
    """A tokenizer with a token for each byte, as those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace():
    """A tokenizer of words that drops the leading space of a text, as that of Llama 2."""
    vocabulary = {word: i for i, word in enumerate(["▁the", "▁end", "s", ".", "▁", "▁of"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@given(st.data())
@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_text_of_each_token_is_that_of_the_tokenizers_own_stream(make, data):
    """As vLLM reads a response: `tokenizers.decoders.DecodeStream` after the prompt."""
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    if make is byte_level:
        text = data.draw(st.text("aé€😀 ", min_size=1, max_size=12))
        stops = [data.draw(st.sampled_from([text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]))]
        letters = _bytes_to_letters()
        ids = [tokenizer.token_to_id(letters[byte]) for byte in text.encode()]
        context = [tokenizer.token_to_id("a")]
    else:
        ids = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12))
        stops = [data.draw(st.sampled_from(["the", " end", "ends.", "of the", ". ", "s"]))]
        context = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    stream, said, expected = decoders.DecodeStream(ids=context, skip_special_tokens=True), "", None
    for count, token in enumerate(ids, 1):
        said += stream.step(tokenizer, token) or ""
        if expected is None and any(stop in said for stop in stops):
            expected = count
    search = StopSearch(stops, lambda some: tokenizer.decode(list(some)), context)
    assert next((n for n, token in enumerate(ids, 1) if search.completed_by(token)), None) == expected


def _bytes_to_letters():
    """GPT-2's mapping of bytes to printable letters."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@pytest.mark.parametrize(
    ("text", "stops", "kept", "with_it", "stop"),
    [
        ("one END two", ["END"], "one ", "one END", "END"),
        ("one END two", ["two", "END"], "one ", "one END", "END"),  # completed first
        ("one END", ["D", "END"], "one EN", "one END", "D"),  # completed together: the first listed
        ("one END", ["END", "D"], "one ", "one END", "END"),
        ("one END", ["E", "END"], "one ", "one E", "E"),
        ("one", ["END"], "one", "one", None),
        ("one", [], "one", "one", None),
    ],
)
def test_a_text_is_cut_at_the_string_that_is_completed_first(text, stops, kept, with_it, stop):
    assert text_until_stop(text, stops) == (kept, stop)
    assert text_until_stop(text, stops, include=True) == (with_it, stop)


def part(ids, reason="stop", version=1):
    return Generation(
        response_ids=tuple(ids), log_probs=tuple(-float(i) for i in ids), finish_reason=reason, weight_version=version
    )


def test_a_string_that_an_update_cut_in_two_ends_the_turn():
    """`ab` is completed by the first token of the continuation, of which the rest is dropped."""
    answers = [part([0, 0], "abort"), part([1, 0, 0], "length", version=2)]

    async def ask(made, left):
        assert left == 8 - len(made)
        return answers.pop(0)

    parts, finish = asyncio.run(generate_turn(ask, 8, lambda ids: tokens_until_stop(ids, words, ["ab"])))
    assert [one.response_ids for one in parts] == [(0, 0), (1,)]
    assert parts[1].log_probs == (-1.0,)
    assert finish == "stop"


def test_a_turn_in_one_part_is_as_the_engine_ended_it():
    async def ask(made, left):
        return part([0, 1, 0], "length")

    parts, finish = asyncio.run(generate_turn(ask, 3, lambda ids: tokens_until_stop(ids, words, ["ab"])))
    assert (len(parts[0].response_ids), finish) == (3, "length")


def test_an_empty_string_and_a_folder_without_tokenizer_are_refused(model_path, tmp_path):
    with pytest.raises(ConfigError, match=r"stop must have no empty strings; got \('a', ''\)"):
        SamplingParams(max_new_tokens=1, stop=("a", ""))
    for file in model_path.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    request = GenerationRequest(uid="p", session=0, prompt_ids=(2,))
    with pytest.raises(ConfigError, match=r"Stop strings need the model's tokenizer: .*tokenizer\.json can't be read"):
        asyncio.run(HFRolloutEngine(tmp_path).generate([request], SamplingParams(max_new_tokens=2, stop=("a",))))
