"""LoraConfig: what is adapted, and how strongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_megatron_peft.naming import TARGETS, suggestion
from rl_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W x + alpha / rank * B A x.

    >>> LoraConfig(rank=8, target_modules=("q_proj", "v_proj")).covers("model.layers.0.self_attn.v_proj")
    True

    Attributes:
        rank: rows of A and columns of B, >= 1.
        alpha: numerator of the scale, above 0.
        dropout: probability with which an input of A is zeroed in training, in [0, 1).
        target_modules: logical names of the adapted modules, without repeats.
        use_dora: train the length of each row of W + alpha / rank * B A as well, apart from its direction (DoRA, Liu et al. 2024,
            https://arxiv.org/abs/2402.09353), as PEFT has it.
        exclude: modules that get no adapter although their name is a target: full Hugging Face names, or their last parts
            (`layers.0.mlp.up_proj`), as in PEFT's `exclude_modules`.

    Raises:
        ConfigError: names the setting, what was got, and the nearest name.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS
    exclude: tuple[str, ...] = ()
    use_dora: bool = False

    def __post_init__(self) -> None:
        _number("rank", self.rank, lambda x: isinstance(x, int) and x >= 1, "an integer >= 1")
        _number("alpha", self.alpha, lambda x: 0 < x < math.inf, "a finite number above 0")
        _number("dropout", self.dropout, lambda x: 0 <= x < 1, "at least 0 and below 1")
        _names("target_modules", self.target_modules)
        _names("exclude", self.exclude)
        if not self.target_modules:
            raise ConfigError(
                f"target_modules is empty: name at least one of {', '.join(TARGETS)}.", field="target_modules"
            )
        for name in self.target_modules:
            _known("target_modules", name, name)
        for name in self.exclude:
            _known("exclude", name, name.rsplit(".", 1)[-1])
            if name in self.target_modules:
                raise ConfigError(
                    f"{name!r} is in both target_modules and exclude; take it out of one.", field="exclude"
                )

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def covers(self, module: str) -> bool:
        """Whether the Hugging Face module of that full name gets an adapter."""
        excluded = any(module == name or module.endswith("." + name) for name in self.exclude)
        return module.rsplit(".", 1)[-1] in self.target_modules and not excluded


def _number(field: str, value: object, fine: Callable[[float], bool], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not fine(value):
        raise ConfigError(f"LoRA {field} must be {wanted}; got {value!r}.", field=field)


def _names(field: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"{field} must be a tuple of names; got {value!r}.", field=field)
    if len(set(value)) != len(value):  # pyright: ignore[reportUnknownArgumentType]
        raise ConfigError(f"{field} names a module twice: {value!r}.", field=field)


def _known(field: str, name: str, last: str) -> None:
    if last not in TARGETS:
        raise ConfigError(
            f"Unknown module {name!r} in {field}; known are {', '.join(TARGETS)}.{suggestion(last, TARGETS)}",
            field=field,
        )
