"""Settings of LoRA, read by every training backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, nearest, option, require

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Logical names of the linear modules of a decoder layer."""
ALL_LINEAR = "all-linear"
EXPERT_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Parameter of the experts of a layer, in order -> modules of each expert whose rows it holds."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    """Low-rank adapters (arXiv:2106.09685): W x + scale B A x, with only A and B trained."""

    rank: int = option(
        0, "rank of the adapters; 0: no LoRA, all weights are trained", ge=0, verl=(".lora_rank", ".lora.rank")
    )
    alpha: float = option(
        32.0,
        "the output of an adapter is scaled by alpha / rank",
        gt=0,
        lt=math.inf,
        verl=(".lora_alpha", ".lora.alpha"),
    )
    dropout: float = option(
        0.0, "probability with which an input of an adapter is zeroed in updates", ge=0, lt=1, verl=".lora.dropout"
    )
    target_modules: tuple[str, ...] = option(
        (ALL_LINEAR,),
        f"modules with an adapter: {', '.join(LINEAR)}; all-linear: all of these",
        verl=(".target_modules", ".lora.target_modules"),
    )
    exclude: tuple[str, ...] = option(
        (),
        "modules without an adapter: full names or their last parts, such as layers.0.mlp.up_proj",
        verl=(".exclude_modules", ".lora.exclude_modules"),
    )
    use_rslora: bool = option(False, "scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732)")
    merge: bool = option(
        False,
        "send the rollout whole weights with the adapter merged in, instead of the adapter alone",
        resume="free",
        verl=".lora.merge",
    )
    use_dora: bool = option(False, "use DoRA (arXiv:2402.09353): train weight magnitudes too")
    adapter_path: str = option(
        "",
        "PEFT folder of the adapter to start from, whose rank, alpha, kind and modules are taken; the reference stays the base; in the app "
        "also verl's old adapter_checkpoint, with alpha set; empty: a new one",
        verl=(".lora_adapter_path", ".lora.adapter_path"),
    )
    merge_on_save: bool = option(
        False, "write whole models, with the adapter merged in, instead of PEFT folders", resume="free"
    )

    def check(self, path: str) -> None:
        require(bool(self.targets()), f"{path}target_modules", f"{ALL_LINEAR} or names of modules", self.target_modules)
        for name in self.targets():
            if name not in LINEAR:
                raise ConfigError(
                    f"{path}target_modules must be {ALL_LINEAR} or some of {', '.join(LINEAR)}; got {name!r}.{nearest(name, LINEAR)}"
                )
        for name in self.exclude:
            last = name.rpartition(".")[2]
            if last not in LINEAR:
                raise ConfigError(
                    f"{path}exclude must name modules that end in one of {', '.join(LINEAR)}; got {name!r}.{nearest(last, LINEAR)}"
                )

    def targets(self) -> tuple[str, ...]:
        """Logical names of `target_modules`, without repeats."""
        return LINEAR if self.target_modules == (ALL_LINEAR,) else tuple(dict.fromkeys(self.target_modules))

    def covers(self, module: str) -> bool:
        """Whether the linear module of that full name gets an adapter."""
        excluded = any(module == name or module.endswith(f".{name}") for name in self.exclude)
        return module.rpartition(".")[2] in self.targets() and not excluded

    def covers_weight(self, name: str) -> bool:
        """Whether a linear module, or a parameter of experts, gets an adapter.

        Raises:
            ConfigError: a part of such a parameter is a target, and another is not.
        """
        module, _, last = name.rpartition(".")
        parts = EXPERT_PARAMETERS.get(last, (last,))
        covered = [self.covers(f"{module}.{part}") for part in parts]
        if any(covered) and not all(covered):
            raise ConfigError(
                f"LoraConfig.target_modules and LoraConfig.exclude must take all of {', '.join(parts)} or none: {name} holds them together."
            )
        return all(covered)

    @property
    def scaling(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
