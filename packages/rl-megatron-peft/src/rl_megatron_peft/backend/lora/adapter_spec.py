"""What an adapter covers of a fused layer, and the names and shards of its factors on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_megatron_peft.base_model.experts import ExpertParameter
from rl_megatron_peft.base_model.layout import ROW_PARALLEL, Layout
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import MegatronModule
from rl_megatron_peft.peft.lora_config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapter of one fused layer, without its tensors.

    Attributes:
        module: the fused layer.
        names: logical name -> full Hugging Face name, for all logical modules of the layer.
        rows: logical name -> rows of its weight on this rank, for all logical modules.
        columns: inputs of the layer over all ranks.
        ranks: logical name -> LoRA rank, for the modules that are targets.
        scaling: logical name -> factor of B A x, for all logical modules.
        shared_a: the logical modules share one A, as in Megatron's LoRA and in PEFT's adapters of
            experts; else each has its own, as in PEFT.
        row_parallel: tensor parallelism splits the inputs of the layer, not its outputs.
        sequence_parallel: each tensor-parallel rank has its own tokens.
    """

    module: MegatronModule
    names: Mapping[str, str]
    rows: Mapping[str, int]
    columns: int
    ranks: Mapping[str, int]
    scaling: Mapping[str, float]
    shared_a: bool
    row_parallel: bool
    sequence_parallel: bool

    @classmethod
    def of(
        cls, module: MegatronModule, config: LoraConfig, shape: ModelShape, layout: Layout, *, fused: bool
    ) -> AdapterSpec:
        """Derive the spec of a layer of which at least one logical module is a target."""
        row_parallel = module.fused in ROW_PARALLEL
        shards = 1 if row_parallel else layout.tensor
        named = _names_in_settings(module)
        return cls(
            module=module,
            names={part.logical: part.name for part in module.parts},
            rows={part.logical: shape.linear(part.logical)[0] // shards for part in module.parts},
            columns=shape.linear(module.parts[0].logical)[1],
            ranks={logical: config.rank_of(named[logical]) for logical in covered_parts(module, config)},
            scaling={logical: config.scaling_of(name) for logical, name in named.items()},
            shared_a=(fused or module.expert is not None) and len(module.parts) > 1,
            row_parallel=row_parallel,
            sequence_parallel=layout.sequence_parallel,
        )

    @property
    def of_expert(self) -> bool:
        """Whether the layer belongs to an expert, which gets its tokens from a dispatcher."""
        return self.module.expert is not None

    @property
    def a_ranks(self) -> dict[str, int]:
        """Key of each A -> its LoRA rank; the key of a shared A is the name of the fused module."""
        return {self.a_key(logical): rank for logical, rank in self.ranks.items()}

    def a_key(self, logical: str) -> str:
        """Return the key of the A that a logical module uses."""
        return self.module.fused if self.shared_a else logical

    def a_name(self, key: str) -> str:
        """Return the global name of an A, given its key."""
        return f"{self.module.name if self.shared_a else self.names[key]}.lora_A"

    def b_name(self, logical: str) -> str:
        """Return the global name of a logical module's B."""
        return f"{self.names[logical]}.lora_B"

    def magnitude_name(self, logical: str) -> str:
        """Return the global name of a logical module's DoRA magnitude."""
        return f"{self.names[logical]}.lora_magnitude_vector"

    @property
    def a_split(self) -> int | None:
        """Dimension in which tensor parallelism splits A; None: every rank holds all of it."""
        return 1 if self.row_parallel else None

    @property
    def out_split(self) -> int | None:
        """Dimension in which tensor parallelism splits B and magnitude; None: it does not."""
        return None if self.row_parallel else 0


def covered_parts(module: MegatronModule, config: LoraConfig) -> tuple[str, ...]:
    """Return the logical modules of a layer that are targets.

    Raises:
        ConfigError: the layer is one of an expert, and a part of it is a target, another is not.
    """
    if module.expert is not None:
        covered = config.covers_experts(ExpertParameter.holding(module))
        return tuple(part.logical for part in module.parts) if covered else ()
    return tuple(part.logical for part in module.parts if config.covers(part.name))


def _names_in_settings(module: MegatronModule) -> dict[str, str]:
    """Logical name -> name by which PEFT finds rank and alpha."""
    if module.expert is not None:
        return dict.fromkeys((part.logical for part in module.parts), ExpertParameter.holding(module).name)
    return {part.logical: part.name for part in module.parts}
