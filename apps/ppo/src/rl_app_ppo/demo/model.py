"""The demo's model, a small Qwen2 with fresh weights, and its transformers tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.demo.tokenizer import BOS, BOS_ID, EOS_ID, PAD, PAD_ID, UNK, VOCABULARY, demo_tokenizer


def model_config(settings: ModelSettings, vocabulary_size: int = len(VOCABULARY)) -> Qwen2Config:
    """The transformers configuration of the demo's model."""
    return Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.initializer_range,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def fresh_model(settings: ModelSettings, seed: int, vocabulary_size: int = len(VOCABULARY)) -> Qwen2ForCausalLM:
    """Create a float32 model on the CPU whose weights depend only on the arguments.

    torch's global generator is not changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(model_config(settings, vocabulary_size))


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY, template: str = "") -> PreTrainedTokenizerFast:
    """`demo_tokenizer` with special tokens, chat template and left padding, as transformers saves
    it.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(vocabulary),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=vocabulary[EOS_ID],
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template or None
    return tokenizer
