"""A tiny real transformers model, made on the spot."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

VOCABULARY = ("<pad>", "<eos>", *"0123456789+=")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Folder of a Qwen2 model of 20 thousand parameters over 14 tokens, and its tokenizer."""
    from tokenizers import Tokenizer, models

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    path = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path
