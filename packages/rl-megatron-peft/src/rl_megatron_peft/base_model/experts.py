"""Names of the parameters of experts in Megatron-Core and in a Hugging Face checkpoint.

  Megatron-Core, SequentialMLP                               Hugging Face, Qwen3-MoE
  decoder.layers.I.mlp.router.weight                         model.layers.I.mlp.gate.weight
  decoder.layers.I.mlp.experts.local_experts.J.linear_fc1.weight  ...mlp.experts.J.gate_proj.weight
                                                             and ...mlp.experts.J.up_proj.weight
  decoder.layers.I.mlp.experts.local_experts.J.linear_fc2.weight  ...mlp.experts.J.down_proj.weight

Experts are numbered as in the whole model, not as on an expert-parallel rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_megatron_peft.base_model.naming import FUSED

ROUTER = "mlp.router.weight"
"""Name of the router's weight within its layer, in Megatron-Core."""

_EXPERT = re.compile(r"^(.+\.mlp\.experts\.local_experts\.)(\d+)\.(linear_fc1|linear_fc2)\.weight$")
_HF_EXPERT = re.compile(r"^model\.layers\.\d+\.mlp\.experts\.(\d+)\.")


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
