"""Sizes of a decoder model, read from `config.json`, and the tensors of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron_peft.base_model.naming import HFModule
from rl_protocol.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Supported values of `model_type`."""

_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "pretraining_tp": (None, 1),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
}
"""Field of config.json -> the values this package supports; any other value is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama, Qwen2, Qwen3 or Qwen3-MoE model.

    Attributes:
        family: its `model_type`.
        layers: number of decoder layers.
        hidden: size of the hidden states.
        ffn: size of the feed-forward layer, or of one expert.
        heads: number of query heads.
        groups: number of key and value heads.
        head_dim: size of one head.
        vocab: number of token ids.
        positions: largest context.
        rope_base: base of the rotary embedding (`rope_theta`).
        eps: epsilon of the norms.
        tied: whether the output layer shares the weight of the embedding.
        experts: number of experts of each layer; 0: the model is dense.
        experts_per_token: number of experts that compute each token.
        top_k_normalized: whether the weights of a token's experts add up to 1.

    Raises:
        ConfigError: a value is missing or unsupported; names the field.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    positions: int
    rope_base: float
    eps: float
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    top_k_normalized: bool = True

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases: only in Qwen2."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head: in Qwen3 and Qwen3-MoE."""
        return self.family in ("qwen3", "qwen3_moe")

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read the shape of the model in a Hugging Face checkpoint folder."""
        file = folder / "config.json"
        try:
            fields = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} can't be read as a model configuration: {error}.", field="config.json"
            ) from error
        return cls.of(fields, str(file))

    @classmethod
    def of(cls, fields: Mapping[str, Any], file: str = "config.json") -> ModelShape:
        """Build the shape from the fields of a `config.json`; `file` is named in errors."""

        def refuse(field: str, wanted: str) -> ConfigError:
            return ConfigError(f"{file}: {field} must be {wanted}; got {fields.get(field)!r}.", field=field)

        def number(field: str) -> int:
            value = fields.get(field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise refuse(field, "an integer >= 1")
            return value

        if fields.get("model_type") not in FAMILIES:
            raise refuse("model_type", f"one of {', '.join(FAMILIES)}")
        for field, known in _REQUIRED_VALUES.items():
            if fields.get(field, known[0]) not in known:
                raise refuse(field, repr(known[-1]))
        rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise refuse("rope_parameters" if "rope_parameters" in fields else "rope_scaling", "of type 'default'")
        heads, hidden = number("num_attention_heads"), number("hidden_size")
        groups = number("num_key_value_heads") if fields.get("num_key_value_heads") is not None else heads
        if heads % groups:
            raise refuse("num_key_value_heads", f"a divisor of the {heads} attention heads")
        sparse = fields["model_type"] == "qwen3_moe"
        count = "num_experts" if "num_experts" in fields else "num_local_experts"  # as transformers 4 and 5 write it
        experts, chosen = (number(count), number("num_experts_per_tok")) if sparse else (0, 0)
        if chosen > experts:
            raise refuse("num_experts_per_tok", f"at most {count}={experts}")
        return cls(
            family=fields["model_type"],
            layers=number("num_hidden_layers"),
            hidden=hidden,
            ffn=number("moe_intermediate_size" if sparse else "intermediate_size"),
            heads=heads,
            groups=groups,
            head_dim=number("head_dim") if fields.get("head_dim") is not None else hidden // heads,
            vocab=number("vocab_size"),
            positions=number("max_position_embeddings"),
            rope_base=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
            eps=float(fields.get("rms_norm_eps", 1e-6)),
            tied=bool(fields.get("tie_word_embeddings", False)),
            experts=experts,
            experts_per_token=chosen,
            top_k_normalized=not sparse or bool(fields.get("norm_topk_prob", False)),
        )

    def linear(self, logical: str) -> tuple[int, int]:
        """Return (out, in) of a linear module, given its logical name."""
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }[logical]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the checkpoint, in layer order."""
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found[f"{prefix}.input_layernorm.weight"] = (self.hidden,)
            for logical in ("q_proj", "k_proj", "v_proj", "o_proj"):
                found[f"{HFModule(layer, logical).name}.weight"] = self.linear(logical)
                if self.qkv_bias and logical != "o_proj":
                    found[f"{HFModule(layer, logical).name}.bias"] = self.linear(logical)[:1]
            if self.qk_norm:
                found |= {f"{prefix}.self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
            found[f"{prefix}.post_attention_layernorm.weight"] = (self.hidden,)
            if self.experts:
                found[f"{prefix}.mlp.gate.weight"] = (self.experts, self.hidden)
            for part in self._feed_forward(f"{prefix}.mlp"):
                found |= {f"{part}.{name}.weight": self.linear(name) for name in ("gate_proj", "up_proj", "down_proj")}
        found[FINAL_NORM] = (self.hidden,)
        if not self.tied:
            found[HEAD] = (self.vocab, self.hidden)
        return found

    def _feed_forward(self, prefix: str) -> list[str]:
        """Names of the feed-forward layers of a layer: of each expert, or the only one."""
        return [f"{prefix}.experts.{number}" for number in range(self.experts)] if self.experts else [prefix]
