"""Families of models whose sequences can be joined end to end in a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

ROUTED_FAMILIES = {
    "mixtral": "MixtralTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
}
"""`model_type` of the families whose experts can be replayed -> class of their routers: each takes
the K largest of a softmax, and most divide these by their sum."""


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The experts of a model of ROUTED_FAMILIES."""

    layers: int
    """Layers that have experts."""
    experts: int
    """Experts of each of them."""
    top_k: int
    """Experts that compute a token in a layer."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> RoutedLayers | None:
        """Those of a model's `config.json`; None: it says none, or the family is another one.

        >>> sizes = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
        >>> RoutedLayers.of({"model_type": "qwen3_moe", "mlp_only_layers": [0], **sizes})
        RoutedLayers(layers=3, experts=8, top_k=2)
        """
        experts = described.get("num_experts", described.get("num_local_experts"))
        if described.get("model_type") not in ROUTED_FAMILIES or not experts:
            return None
        every, dense = int(described.get("decoder_sparse_step") or 1), described.get("mlp_only_layers") or ()
        layers = range(int(described["num_hidden_layers"]))
        routed = sum(layer not in dense and (layer + 1) % every == 0 for layer in layers)
        return cls(layers=routed, experts=int(experts), top_k=int(described["num_experts_per_tok"]))


def why_padded(model_type: str) -> str:
    """What a model of this `model_type` has that keeps its sequences apart; empty: nothing."""
    if model_type in (*JOINED_FAMILIES, *FAMILIES):
        return ""
    return f"has model_type={model_type!r}, for which joining sequences is not tested"
