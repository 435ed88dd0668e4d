"""Names of the parameters of experts: in Megatron-Core, in a Hugging Face checkpoint, and in
transformers, which holds those of all experts of a layer in one parameter.

  Megatron-Core, SequentialMLP                               Hugging Face, Qwen3-MoE
  decoder.layers.I.mlp.router.weight                         model.layers.I.mlp.gate.weight
  decoder.layers.I.mlp.experts.local_experts.J.linear_fc1.weight  ...mlp.experts.J.gate_proj.weight
                                                             and ...mlp.experts.J.up_proj.weight
  decoder.layers.I.mlp.experts.local_experts.J.linear_fc2.weight  ...mlp.experts.J.down_proj.weight

  transformers (and PEFT)                                    rows of
  model.layers.I.mlp.experts.gate_up_proj [experts, out, in] gate_proj, then up_proj, of each expert
  model.layers.I.mlp.experts.down_proj    [experts, out, in] down_proj of each expert

Experts are numbered as in the whole model, not as on an expert-parallel rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_megatron_peft.base_model.naming import FUSED, MegatronModule

ROUTER = "mlp.router.weight"
"""Name of the router's weight within its layer, in Megatron-Core."""

_EXPERT = re.compile(r"^(.+\.mlp\.experts\.local_experts\.)(\d+)\.(linear_fc1|linear_fc2)\.weight$")
_HF_EXPERT = re.compile(r"^model\.layers\.\d+\.mlp\.experts\.(\d+)\.")
_PARAMETER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.mlp\.experts\.(gate_up_proj|down_proj)", re.ASCII)

EXPERT_PARAMETERS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
"""Parameter of the experts of a layer in transformers, in order -> Megatron-Core module of each."""


@dataclass(frozen=True, slots=True, order=True)
class ExpertParameter:
    """A parameter of transformers with one matrix of every expert of a layer.

    >>> ExpertParameter(3, "gate_up_proj").targets
    ('model.layers.3.mlp.experts.gate_proj', 'model.layers.3.mlp.experts.up_proj')

    Attributes:
        layer: number of the layer in the whole model.
        parameter: a key of EXPERT_PARAMETERS.
    """

    layer: int
    parameter: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def module(self) -> str:
        """The module that has the parameter."""
        return f"model.layers.{self.layer}.mlp.experts"

    @property
    def logical(self) -> tuple[str, ...]:
        """The logical modules whose rows it holds, in order."""
        return FUSED[EXPERT_PARAMETERS[self.parameter]]

    @property
    def targets(self) -> tuple[str, ...]:
        """The names by which LoRA settings choose it."""
        return tuple(f"{self.module}.{logical}" for logical in self.logical)

    def megatron(self, expert: int) -> MegatronModule:
        """Return the fused module of one expert."""
        return MegatronModule(self.layer, EXPERT_PARAMETERS[self.parameter], expert)

    @classmethod
    def parse(cls, name: str) -> ExpertParameter | None:
        """Parse a `name`; None: it names no such parameter."""
        match = _PARAMETER.fullmatch(name)
        return cls(int(match[1]), match[2]) if match else None

    @classmethod
    def holding(cls, module: MegatronModule) -> ExpertParameter:
        """Return the parameter that holds a fused module of an expert."""
        named = {fused: parameter for parameter, fused in EXPERT_PARAMETERS.items()}
        return cls(module.layer, named[module.fused])


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A weight of one expert in Megatron-Core.

    Attributes:
        prefix: the name before the expert's number.
        expert: number of the expert.
        fused: `linear_fc1` or `linear_fc2`.
    """

    prefix: str
    expert: int
    fused: str

    @classmethod
    def parse(cls, parameter: str) -> ExpertWeight | None:
        """Parse the name of a parameter; None: it is none of an expert."""
        match = _EXPERT.match(parameter)
        return cls(match[1], int(match[2]), match[3]) if match else None

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return f"{self.prefix}{self.expert}.{self.fused}.weight"

    def hf_names(self, layer: int) -> tuple[str, ...]:
        """Return the names of the checkpoint's tensors that it holds, in order.

        >>> ExpertWeight("decoder.layers.1.mlp.experts.local_experts.", 3, "linear_fc2").hf_names(1)
        ('model.layers.1.mlp.experts.3.down_proj.weight',)
        """
        return tuple(f"model.layers.{layer}.mlp.experts.{self.expert}.{part}.weight" for part in FUSED[self.fused])


def expert_of(hf_name: str) -> int | None:
    """Return the number of the expert that a tensor of a checkpoint belongs to; None: to none.

    >>> expert_of("model.layers.1.mlp.experts.3.down_proj.weight")
    3
    """
    match = _HF_EXPERT.match(hf_name)
    return int(match[1]) if match else None
