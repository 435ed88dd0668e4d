"""Layout over ranks: the parameter, stage and shard that hold each tensor of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron_peft.base_model.experts import ROUTER, ExpertWeight
from rl_megatron_peft.base_model.model_shape import EMBEDDING, FINAL_NORM, HEAD, ModelShape
from rl_megatron_peft.base_model.naming import MegatronModule, hf_parameter
from rl_protocol.errors import ConfigError

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Fused modules that tensor parallelism splits by input; it splits the others by output."""

_LAYER = re.compile(r"^((?:model|decoder)\.layers\.)(\d+)(\..+)$")
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint.

    Attributes:
        name: its name in the checkpoint.
        split: dimension that tensor parallelism splits; None if every rank holds the whole tensor.
    """

    name: str
    split: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is divided over ranks; the remaining ranks are data-parallel replicas.

    Attributes:
        tensor: tensor-parallel ranks per layer.
        pipeline: pipeline stages.
        sequence_parallel: also divide the tokens between layers over the tensor-parallel ranks
            (Korthikanti et al. 2022, arXiv:2205.05198). The weights stay where they are.
        expert: expert-parallel ranks: that many data-parallel replicas divide the experts of each
            layer among them (Lepikhin et al. 2021, arXiv:2006.16668).

    Raises:
        ConfigError: a number below 1, or sequence_parallel with tensor=1.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Layout.{name} must be at least 1; got {getattr(self, name)}.", field=name)
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "Layout.sequence_parallel divides tokens over tensor-parallel ranks; got tensor=1. Set tensor to 2 or more.",
                field="sequence_parallel",
            )

    def check(self, shape: ModelShape) -> None:
        """Check that the model can be divided this way.

        Raises:
            ConfigError: a size of the model is not divisible; names it.
        """
        for name in ("heads", "groups", "ffn"):
            if getattr(shape, name) % self.tensor:
                raise ConfigError(
                    f"The model's {name}={getattr(shape, name)} can't be divided over tensor={self.tensor} ranks; choose a divisor.",
                    field="tensor",
                )
        self._check_experts(shape)
        if shape.layers % self.pipeline:
            raise ConfigError(
                f"The model's {shape.layers} layers can't be divided over pipeline={self.pipeline} stages; choose a divisor.",
                field="pipeline",
            )

    def check_whole(self, shape: ModelShape) -> None:
        """Check that all weights of the model can be trained when it is divided this way.

        Raises:
            ConfigError: copies of the embedding, or padding rows, would have to be kept equal.
        """
        if shape.tied and self.pipeline > 1:
            raise ConfigError(
                "Training all weights of a model with a tied output layer needs the embedding and the output layer in one "
                f"stage; got pipeline={self.pipeline}. Set pipeline=1, or train adapters.",
                field="pipeline",
            )
        if shape.vocab % self.tensor:
            raise ConfigError(
                f"Training all weights needs a vocabulary divisible by tensor={self.tensor}; got {shape.vocab}. Choose a "
                "divisor, or train adapters.",
                field="tensor",
            )

    def _check_experts(self, shape: ModelShape) -> None:
        if self.expert > 1 and (not shape.experts or shape.experts % self.expert):
            raise ConfigError(
                f"The model's experts={shape.experts} can't be divided over expert={self.expert} ranks; choose a divisor.",
                field="expert",
            )
        if shape.experts and self.tensor > 1 and not self.sequence_parallel:
            raise ConfigError(
                f"A model with experts needs sequence_parallel=True with tensor={self.tensor}: each expert would get every token "
                "from each tensor-parallel rank.",
                field="sequence_parallel",
            )

    def expert_rank(self, expert: int, shape: ModelShape) -> int:
        """Return the expert-parallel rank that holds an expert of this number in the model."""
        return expert // (shape.experts // self.expert)

    def padded_vocab(self, shape: ModelShape) -> int:
        """Return the vocabulary size rounded up to a multiple of `tensor`."""
        return -(-shape.vocab // self.tensor) * self.tensor

    def stage(self, hf_name: str, shape: ModelShape) -> int:
        """Return the stage that holds a tensor or module; a tied embedding belongs to the first."""
        match = _LAYER.match(hf_name)
        if match:
            return int(match[2]) // (shape.layers // self.pipeline)
        return 0 if hf_name == EMBEDDING else self.pipeline - 1


def state_owners(sizes: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Assign the optimizer state of parameters of these sizes to replicas.

    The largest comes first, and each goes to the replica that owns least.

    >>> state_owners([2, 8, 3, 3], 2)
    (1, 0, 1, 1)
    """
    owned, owners = [0] * replicas, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = owned.index(min(owned))
        owned[owners[number]] += sizes[number]
    return tuple(owners)


def global_name(parameter: str, first_layer: int, first_expert: int = 0) -> str:
    """Return the name of a stage's parameter with the numbers of its layer and of its expert in the
    whole model.

    >>> global_name("decoder.layers.0.mlp.linear_fc2.weight", 4)
    'decoder.layers.4.mlp.linear_fc2.weight'
    """
    weight = ExpertWeight.parse(parameter)
    if weight is not None:
        parameter = dataclasses.replace(weight, expert=weight.expert + first_expert).name
    match = _LAYER.match(parameter)
    return f"{match[1]}{int(match[2]) + first_layer}{match[3]}" if match else parameter


def hf_tensors(parameter: str, *, tied: bool = False) -> tuple[HFTensor, ...]:
    """Return the checkpoint tensors that a Megatron-Core parameter holds, in order.

    Layers are numbered as in the whole model.

    >>> hf_tensors("decoder.layers.1.mlp.linear_fc2.weight")
    (HFTensor(name='model.layers.1.mlp.down_proj.weight', split=1),)

    Raises:
        ConfigError: no supported family has such a parameter.
    """
    if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
        name = EMBEDDING if tied or parameter.startswith("embedding") else HEAD
        return (HFTensor(name, 0),)
    if parameter == "decoder.final_layernorm.weight":
        return (HFTensor(FINAL_NORM, None),)
    match = _LAYER.match(parameter)
    if match and match[3][1:] in _NORMS:
        return (HFTensor(f"model.layers.{match[2]}.{_NORMS[match[3][1:]]}", None),)
    if match and match[3][1:] == ROUTER:
        return (HFTensor(f"model.layers.{match[2]}.mlp.gate.weight", None),)
    weight = ExpertWeight.parse(parameter)
    if match and weight is not None:
        names = weight.hf_names(int(match[2]))
        return tuple(HFTensor(name, 1 if weight.fused in ROW_PARALLEL else 0) for name in names)
    module, _, leaf = parameter.rpartition(".")
    row_parallel = MegatronModule.parse(module).fused in ROW_PARALLEL
    split = (1 if leaf == "weight" else None) if row_parallel else 0
    return tuple(HFTensor(name, split) for name in hf_parameter(parameter))
