"""Configuration of a small Qwen3 model, as in its config.json."""

from __future__ import annotations

from typing import Any

FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "rope_theta": 1e6,
}
