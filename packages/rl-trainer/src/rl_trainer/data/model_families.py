"""Families of models whose sequences can be joined end to end in a forward pass."""

from __future__ import annotations

from rl_trainer.data.images import FAMILIES

JOINED_FAMILIES = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""`model_type` of the families that are tested: positions and causal attention, with or without a
sliding window, are all that tells their sequences apart.

In other families a recurrent state, a bias or sinks of the attention would be lost or would reach
the next sequence."""


def why_padded(model_type: str) -> str:
    """What a model of this `model_type` has that keeps its sequences apart; empty: nothing."""
    if model_type in JOINED_FAMILIES:
        return ""
    if model_type in FAMILIES:
        return "sees images, which can't be joined end to end"
    return f"has model_type={model_type!r}, for which joining sequences is not tested"
