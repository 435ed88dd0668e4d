"""Where each tensor of a Hugging Face checkpoint lies in Megatron-Core: parameter, pipeline stage, and how tensor parallelism cuts it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron_peft.family import EMBEDDING, FINAL_NORM, HEAD, ModelShape
from rl_megatron_peft.naming import MegatronModule, hf_parameter
from rl_protocol.errors import ConfigError

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Fused modules whose inputs tensor parallelism cuts; of the others it cuts the outputs."""

_LAYER = re.compile(r"^((?:model|decoder)\.layers\.)(\d+)(\..+)$")
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the checkpoint and the dimension that tensor parallelism cuts; None: every rank has the whole."""

    name: str
    split: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks share a layer (`tensor`) and how many stages share the layers (`pipeline`); all others are replicas of the data.

    With `sequence_parallel` the ranks that share a layer share the tokens between its parts as well (Korthikanti et al. 2022,
    arXiv:2205.05198): norms and residuals of a token are on one of them. What is held where is the same.

    Raises:
        ConfigError: numbers below 1; sequence_parallel where no ranks share a layer.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Layout.{name} must be at least 1; got {getattr(self, name)}.", field=name)
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "Layout.sequence_parallel shares tokens among the ranks that share a layer; got tensor=1. Set tensor to 2 or more.",
                field="sequence_parallel",
            )

    def check(self, shape: ModelShape) -> None:
        """That the model can be cut up so.

        Raises:
            ConfigError: says which number of the model does not divide.
        """
        for name in ("heads", "groups", "ffn"):
            if getattr(shape, name) % self.tensor:
                raise ConfigError(
                    f"The model's {name}={getattr(shape, name)} can't be shared by tensor={self.tensor} ranks; choose a divisor.",
                    field="tensor",
                )
        if shape.layers % self.pipeline:
            raise ConfigError(
                f"The model's {shape.layers} layers can't be shared by pipeline={self.pipeline} stages; choose a divisor.",
                field="pipeline",
            )

    def padded_vocab(self, shape: ModelShape) -> int:
        """Rows of embedding and output layer: the next multiple of `tensor`."""
        return -(-shape.vocab // self.tensor) * self.tensor

    def stage(self, hf_name: str, shape: ModelShape) -> int:
        """The pipeline stage that holds a tensor or module; a tied embedding counts for the first."""
        match = _LAYER.match(hf_name)
        if match:
            return int(match[2]) // (shape.layers // self.pipeline)
        return 0 if hf_name == EMBEDDING else self.pipeline - 1


def keepers(sizes: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Which replica keeps the optimizer's state of each parameter, of so many numbers: the largest first, each to the one that has least.

    >>> keepers([2, 8, 3, 3], 2)
    (1, 0, 1, 1)
    """
    kept, found = [0] * replicas, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        found[number] = kept.index(min(kept))
        kept[found[number]] += sizes[number]
    return tuple(found)


def renumbered(parameter: str, first_layer: int) -> str:
    """A stage's name of a parameter with the layer's number in the whole model.

    >>> renumbered("decoder.layers.0.mlp.linear_fc2.weight", 4)
    'decoder.layers.4.mlp.linear_fc2.weight'
    """
    match = _LAYER.match(parameter)
    return f"{match[1]}{int(match[2]) + first_layer}{match[3]}" if match else parameter


def held_tensors(parameter: str, *, tied: bool = False) -> tuple[HFTensor, ...]:
    """What a parameter of Megatron-Core holds, in order; layers are numbered as in the whole model.

    >>> held_tensors("decoder.layers.1.mlp.linear_fc2.weight")
    (HFTensor(name='model.layers.1.mlp.down_proj.weight', split=1),)

    Raises:
        ConfigError: a parameter that no family has.
    """
    if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
        name = EMBEDDING if tied or parameter.startswith("embedding") else HEAD
        return (HFTensor(name, 0),)
    if parameter == "decoder.final_layernorm.weight":
        return (HFTensor(FINAL_NORM, None),)
    match = _LAYER.match(parameter)
    if match and match[3][1:] in _WHOLE:
        return (HFTensor(f"model.layers.{match[2]}.{_WHOLE[match[3][1:]]}", None),)
    module, _, leaf = parameter.rpartition(".")
    row_parallel = MegatronModule.parse(module).fused in ROW_PARALLEL
    split = (1 if leaf == "weight" else None) if row_parallel else 0
    return tuple(HFTensor(name, split) for name in hf_parameter(parameter))
