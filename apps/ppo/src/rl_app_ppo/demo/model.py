"""The demo's model: a small Qwen2 with fresh weights."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.demo.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCABULARY


def model_config(settings: ModelSettings, vocabulary_size: int = len(VOCABULARY)) -> Qwen2Config:
    """The transformers configuration of that shape."""
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
    """A float32 model on the CPU whose weights depend on the arguments alone; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(model_config(settings, vocabulary_size))
