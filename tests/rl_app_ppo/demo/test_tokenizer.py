"""The tokenizer: ids, round trip, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rl_app_ppo.demo.addition import make_split
from rl_app_ppo.demo.model import build_tokenizer
from rl_app_ppo.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY


def test_round_trip_of_every_text() -> None:
    tokenizer = build_tokenizer()
    for problem in make_split(0, train_size=200, validation_size=1).train:
        for text in (problem.prompt, problem.answer):
            ids = tokenizer.encode(text)
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = build_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert len({PAD_ID, BOS_ID, EOS_ID}) == 3
    assert len(tokenizer) == len(VOCABULARY) == 16


def test_decoding_drops_special_tokens_and_adds_no_space() -> None:
    tokenizer = build_tokenizer()
    ids = [*tokenizer.encode("280"), EOS_ID, PAD_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "280"


def test_unknown_characters_become_unk() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.encode("1x") == [1, tokenizer.unk_token_id]


def test_pads_on_the_left() -> None:
    batch = build_tokenizer()(["37+45=", "7="], padding=True)
    assert batch["input_ids"][1][:4] == [PAD_ID] * 4
    assert batch["attention_mask"][1] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("text", ["37+45=", "280", "="])
def test_saved_tokenizer_is_the_same(tmp_path: Path, text: str) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode(text) == build_tokenizer().encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.padding_side == "left"
