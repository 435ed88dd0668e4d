"""Names of LoRA targets: Hugging Face modules and the fused modules of Megatron-Core.

  logical name           Hugging Face                    Megatron-Core
  q_proj, k_proj, v_proj model.layers.I.self_attn.q_proj decoder.layers.I.self_attention.linear_qkv
  o_proj                 model.layers.I.self_attn.o_proj decoder.layers.I.self_attention.linear_proj
  gate_proj, up_proj     model.layers.I.mlp.gate_proj    decoder.layers.I.mlp.linear_fc1
  down_proj              model.layers.I.mlp.down_proj    decoder.layers.I.mlp.linear_fc2

Those of expert J are below mlp.experts.J and below mlp.experts.local_experts.J.

linear_fc1 holds the rows of gate_proj, then those of up_proj. linear_qkv interleaves: for each
group of query heads that share a key and value head, it holds the rows of the queries, then the
key, then the value (see `qkv_rows`). Layers are numbered as in the whole model, not as in a
pipeline stage.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl_protocol.errors import ConfigError

_SECTION = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
_FUSED_SECTION = {
    "linear_qkv": "self_attention",
    "linear_proj": "self_attention",
    "linear_fc1": "mlp",
    "linear_fc2": "mlp",
}

TARGETS = tuple(_SECTION)
"""Logical names, in layer order."""

FUSED: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron-Core module -> the logical names it holds, in order."""

_FUSED_OF = {logical: fused for fused, parts in FUSED.items() for logical in parts}
_NUMBER = r"(0|[1-9]\d{0,5})"
_HF = re.compile(rf"model\.layers\.{_NUMBER}\.(self_attn|mlp)\.(\w+)", re.ASCII)
_MEGATRON = re.compile(rf"decoder\.layers\.{_NUMBER}\.(self_attention|mlp)\.(\w+)", re.ASCII)
_LEAF = re.compile(r"(.+)\.(weight|bias)", re.ASCII)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True, slots=True, order=True)
class HFModule:
    """One linear module of a Hugging Face model.

    >>> HFModule.parse("model.layers.3.mlp.up_proj")
    HFModule(layer=3, logical='up_proj', expert=None)
    >>> HFModule(3, "up_proj").megatron.name
    'decoder.layers.3.mlp.linear_fc1'

    Attributes:
        layer: number of the layer in the whole model.
        logical: its logical name.
        expert: number of the expert in the whole model; None: it belongs to none.

    Raises:
        ConfigError: the name is not a LoRA target.
    """

    layer: int
    logical: str
    expert: int | None = None

    def __post_init__(self) -> None:
        _check(self.layer, self.logical, _SECTION)
        _check_expert(self.expert, self.logical, _SECTION)

    @property
    def name(self) -> str:
        expert = "" if self.expert is None else f"experts.{self.expert}."
        return f"model.layers.{self.layer}.{_SECTION[self.logical]}.{expert}{self.logical}"

    @property
    def megatron(self) -> MegatronModule:
        """The fused module that holds this one."""
        return MegatronModule(self.layer, _FUSED_OF[self.logical], self.expert)

    @property
    def part(self) -> int:
        """Index of this module among the parts of its fused module."""
        return FUSED[_FUSED_OF[self.logical]].index(self.logical)

    @classmethod
    def parse(cls, name: str) -> HFModule:
        """Parse a `name` that belongs to no expert."""
        match = _HF.fullmatch(name)
        if match and _SECTION.get(match[3]) == match[2]:
            return cls(int(match[1]), match[3])
        raise ConfigError(
            f"{name!r} is not a LoRA target of a Hugging Face model; expected a name like 'model.layers.0.self_attn.q_proj'."
            + suggestion(name.rsplit(".", 1)[-1], TARGETS)
        )


@dataclass(frozen=True, slots=True, order=True)
class MegatronModule:
    """One fused linear module of Megatron-Core.

    Examples:
        >>> module = MegatronModule.parse("decoder.layers.0.self_attention.linear_qkv")
        >>> [part.logical for part in module.parts]
        ['q_proj', 'k_proj', 'v_proj']

    Attributes:
        layer: number of the layer in the whole model.
        fused: its name in the layer.
        expert: number of the expert in the whole model; None: it belongs to none.

    Raises:
        ConfigError: the name is not a LoRA target.
    """

    layer: int
    fused: str
    expert: int | None = None

    def __post_init__(self) -> None:
        _check(self.layer, self.fused, FUSED)
        _check_expert(self.expert, self.fused, _FUSED_SECTION)

    @property
    def name(self) -> str:
        expert = "" if self.expert is None else f"experts.local_experts.{self.expert}."
        return f"decoder.layers.{self.layer}.{_FUSED_SECTION[self.fused]}.{expert}{self.fused}"

    @property
    def parts(self) -> tuple[HFModule, ...]:
        """The Hugging Face modules that this one holds, in order."""
        return tuple(HFModule(self.layer, logical, self.expert) for logical in FUSED[self.fused])

    @classmethod
    def parse(cls, name: str) -> MegatronModule:
        """Parse a `name` that belongs to no expert."""
        match = _MEGATRON.fullmatch(name)
        if match and _FUSED_SECTION.get(match[3]) == match[2]:
            return cls(int(match[1]), match[3])
        raise ConfigError(
            f"{name!r} is not a LoRA target of Megatron-Core; expected a name like 'decoder.layers.0.self_attention.linear_qkv'."
            + suggestion(name.rsplit(".", 1)[-1], FUSED)
        )


def _check(layer: int, name: str, known: Iterable[str]) -> None:
    names = tuple(known)
    if name not in names:
        raise ConfigError(f"{name!r} is not a LoRA target; known are {', '.join(names)}." + suggestion(name, names))
    if not 0 <= layer < 10**6:
        raise ConfigError(f"The layer of {name} must be >= 0; got {layer}.")


def _check_expert(expert: int | None, name: str, sections: Mapping[str, str]) -> None:
    if expert is None:
        return
    if sections[name] != "mlp":
        raise ConfigError(f"{name} belongs to no expert; got expert={expert}.")
    if expert < 0:
        raise ConfigError(f"The expert of {name} must be >= 0; got expert={expert}.")


def megatron_parameter(hf_name: str) -> tuple[str, int]:
    """Return the Megatron-Core parameter that holds a Hugging Face parameter, and its part's index.

    >>> megatron_parameter("model.layers.0.self_attn.k_proj.bias")
    ('decoder.layers.0.self_attention.linear_qkv.bias', 1)

    Raises:
        ConfigError: the name is not the weight or bias of a LoRA target.
    """
    module, leaf = _split(hf_name)
    target = HFModule.parse(module)
    return f"{target.megatron.name}.{leaf}", target.part


def hf_parameter(megatron_name: str) -> tuple[str, ...]:
    """Return the Hugging Face parameters that a Megatron-Core parameter holds, in order.

    >>> hf_parameter("decoder.layers.2.mlp.linear_fc1.weight")
    ('model.layers.2.mlp.gate_proj.weight', 'model.layers.2.mlp.up_proj.weight')

    Raises:
        ConfigError: the name is not the weight or bias of a LoRA target.
    """
    module, leaf = _split(megatron_name)
    return tuple(f"{part.name}.{leaf}" for part in MegatronModule.parse(module).parts)


def _split(name: str) -> tuple[str, str]:
    match = _LEAF.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a parameter of a LoRA target; its last part must be 'weight' or 'bias'.")
    return match[1], match[2]


def fused_targets(logical: Sequence[str]) -> tuple[str, ...]:
    """Return the fused modules that consist of these logical modules.

    >>> fused_targets(["o_proj", "up_proj", "gate_proj"])
    ('linear_proj', 'linear_fc1')

    Raises:
        ConfigError: a name is unknown, or some parts of a fused module are missing: an adapter on
            the fused module trains all of them.
    """
    for name in logical:
        _check(0, name, TARGETS)
    chosen = tuple(fused for fused, parts in FUSED.items() if set(parts) & set(logical))
    for fused in chosen:
        missing = [part for part in FUSED[fused] if part not in logical]
        if missing:
            raise ConfigError(
                f"Megatron-Core fuses {', '.join(FUSED[fused])} into {fused}: target all of them or none; missing {', '.join(missing)}."
            )
    return chosen


def qkv_rows(num_heads: int, num_groups: int, head_dim: int) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of linear_qkv that make up q_proj, k_proj and v_proj, in Hugging Face order.

    With two query heads per group and one row per head the rows are q0 q1 k0 v0 q2 q3 k1 v1.

    >>> qkv_rows(num_heads=4, num_groups=2, head_dim=1)
    ([0, 1, 4, 5], [2, 6], [3, 7])

    Raises:
        ConfigError: a number is not positive, or the heads can't be divided into groups.
    """
    if min(num_heads, num_groups, head_dim) < 1 or num_heads % num_groups:
        raise ConfigError(
            f"num_heads must be a positive multiple of num_groups and head_dim positive; got {num_heads}, {num_groups}, {head_dim}."
        )
    queries = num_heads // num_groups * head_dim
    stride = queries + 2 * head_dim
    starts = range(0, num_groups * stride, stride)
    q = [start + i for start in starts for i in range(queries)]
    k = [start + queries + i for start in starts for i in range(head_dim)]
    v = [start + queries + head_dim + i for start in starts for i in range(head_dim)]
    return q, k, v
