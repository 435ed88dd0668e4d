"""LoRA: the one block of settings that every training engine reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.algorithms.registry import nearest
from rl_trainer.settings import option, require

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Logical names of the linear modules of a decoder layer."""
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W x + scale B A x, where A and B alone are trained."""

    rank: int = option(0, "rank of the adapters; 0: no LoRA, all weights are trained")
    alpha: float = option(32.0, "numerator of their scale, alpha / rank")
    dropout: float = option(0.0, "probability with which an input of an adapter is zeroed in updates")
    target_modules: str = option(
        ALL_LINEAR, f"comma-separated modules that get one: {', '.join(LINEAR)}; all-linear: all of these"
    )
    exclude: str = option(
        "", "comma-separated modules that get none: full names or their last parts, such as layers.0.mlp.up_proj"
    )
    use_rslora: bool = option(False, "scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)")
    merge: bool = option(
        False, "send the rollout whole weights with the adapter merged in, instead of the adapter alone"
    )
    use_dora: bool = option(False, "train the length of each output's weights as well (DoRA, arXiv:2402.09353)")

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", "at least 0", self.rank)
        require(0 < self.alpha < math.inf, "lora.alpha", "greater than 0", self.alpha)
        require(0 <= self.dropout < 1, "lora.dropout", "in [0, 1)", self.dropout)
        require(bool(self.targets()), "lora.target_modules", f"{ALL_LINEAR} or names of modules", self.target_modules)
        for name in self.targets():
            if name not in LINEAR:
                raise ConfigError(
                    f"lora.target_modules must be {ALL_LINEAR} or some of {', '.join(LINEAR)}; got {name!r}.{nearest(name, LINEAR)}"
                )
        for name in self.excluded():
            last = name.rpartition(".")[2]
            if last not in LINEAR:
                raise ConfigError(
                    f"lora.exclude must name modules that end in one of {', '.join(LINEAR)}; got {name!r}.{nearest(last, LINEAR)}"
                )

    def targets(self) -> tuple[str, ...]:
        """`target_modules`, parsed: logical names without repeats."""
        return LINEAR if self.target_modules == ALL_LINEAR else _names(self.target_modules)

    def excluded(self) -> tuple[str, ...]:
        """`exclude`, parsed."""
        return _names(self.exclude)

    def covers(self, module: str) -> bool:
        """Whether the linear module of that full name gets an adapter."""
        excluded = any(module == name or module.endswith(f".{name}") for name in self.excluded())
        return module.rpartition(".")[2] in self.targets() and not excluded

    @property
    def scaling(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
