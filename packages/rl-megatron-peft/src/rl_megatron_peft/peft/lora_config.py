"""LoraConfig: which modules get adapters, and of what rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rl_megatron_peft.base_model.experts import ExpertParameter
from rl_megatron_peft.base_model.naming import TARGETS, suggestion
from rl_protocol.errors import ConfigError

Modules = tuple[str, ...] | re.Pattern[str]
"""Modules by name, or a regular expression that matches their full names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Settings of LoRA (Hu et al. 2021, arXiv:2106.09685): W x + alpha / rank * B A x.

    Module names and patterns are matched as in PEFT's LoraConfig. The modules of all experts of a
    layer are one: `model.layers.0.mlp.experts.down_proj`. PEFT adapts a parameter that holds the
    matrices of all experts, and finds its rank and alpha by that parameter's name.

    >>> config = LoraConfig(rank=8, target_modules=("q_proj", "v_proj"))
    >>> config.covers("model.layers.0.self_attn.v_proj")
    True
    >>> LoraConfig(rank=8, rank_pattern={"v_proj": 2}).rank_of("model.layers.0.self_attn.v_proj")
    2

    Attributes:
        rank: rows of A and columns of B, at least 1.
        alpha: numerator of the scale, above 0.
        dropout: probability of zeroing an input of A in training, in [0, 1).
        target_modules: the adapted modules, each at most once: logical names (`q_proj`), full
            Hugging Face names, or their last parts (`layers.0.mlp.up_proj`); or a compiled regular
            expression that matches full names.
        exclude: modules without an adapter, in the same forms; wins over target_modules.
        use_dora: use DoRA: train weight magnitudes too (Liu et al. 2024, arXiv:2402.09353).
        use_rslora: scale by alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).
        rank_pattern: regular expression for the last parts of a full name -> rank of the modules
            it matches. The first match is used.
        alpha_pattern: the same for alpha.

    Raises:
        ConfigError: a setting is wrong; names it, the value, and the nearest known name.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Modules = TARGETS
    exclude: Modules = ()
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        _number("rank", self.rank, *_RANK)
        _number("alpha", self.alpha, *_ALPHA)
        _number("dropout", self.dropout, lambda x: 0 <= x < 1, "at least 0 and below 1")
        _modules("target_modules", self.target_modules)
        _modules("exclude", self.exclude)
        _pattern("rank_pattern", self.rank_pattern, *_RANK)
        _pattern("alpha_pattern", self.alpha_pattern, *_ALPHA)
        if not self.target_modules:
            raise ConfigError(
                f"target_modules is empty: name at least one of {', '.join(TARGETS)}.", field="target_modules"
            )
        both = set(_listed(self.target_modules)) & set(_listed(self.exclude))
        if both:
            raise ConfigError(
                f"{min(both)!r} is in both target_modules and exclude; remove it from one.", field="exclude"
            )

    @classmethod
    def from_manifest(cls, fields: Mapping[str, Any]) -> LoraConfig:
        """Rebuild the settings from `manifest_fields` and, if it is there, the field `dropout`.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or wrong.
        """
        return cls(
            rank=fields["rank"],
            alpha=fields["alpha"],
            dropout=fields.get("dropout", 0.0),
            target_modules=_modules_from_json(fields["target_modules"]),
            exclude=_modules_from_json(fields["exclude"]),
            use_dora=fields["use_dora"],
            use_rslora=fields["use_rslora"],
            rank_pattern=dict(fields["rank_pattern"]),
            alpha_pattern=dict(fields["alpha_pattern"]),
        )

    def manifest_fields(self) -> dict[str, object]:
        """Return the settings that two compatible adapters share, as JSON values.

        Patterns become lists of pairs because their order matters.
        """
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "target_modules": _modules_to_json(self.target_modules),
            "exclude": _modules_to_json(self.exclude),
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
            "rank_pattern": [list(pair) for pair in self.rank_pattern.items()],
            "alpha_pattern": [list(pair) for pair in self.alpha_pattern.items()],
        }

    def covers(self, module: str) -> bool:
        """Return whether the Hugging Face module of that full name gets an adapter."""
        return _matches(self.target_modules, module) and not _matches(self.exclude, module)

    def covers_experts(self, parameter: ExpertParameter) -> bool:
        """Return whether a parameter of experts gets an adapter.

        Raises:
            ConfigError: a part of it is a target, and another is not.
        """
        covered = [self.covers(target) for target in parameter.targets]
        if any(covered) and not all(covered):
            raise ConfigError(
                f"target_modules and exclude must take all of {', '.join(parameter.logical)} of experts or none: they share one A in "
                f"{parameter.name}; got {self.target_modules!r} and {self.exclude!r}.",
                field="target_modules",
            )
        return all(covered)

    def rank_of(self, module: str) -> int:
        """Return the adapter rank of the Hugging Face module of that full name."""
        return _found(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of the Hugging Face module of that full name."""
        return _found(self.alpha_pattern, module, self.alpha)

    def scaling_of(self, module: str) -> float:
        """Return the factor of B A x of the Hugging Face module of that full name."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)


V = TypeVar("V", int, float)
_Check = tuple[Callable[[float], bool], str]
_RANK: _Check = (lambda x: isinstance(x, int) and x >= 1, "an integer >= 1")
_ALPHA: _Check = (lambda x: 0 < x < math.inf, "a finite number above 0")


def _modules_to_json(modules: Modules) -> list[str] | str:
    return sorted(modules) if isinstance(modules, tuple) else modules.pattern


def _modules_from_json(modules: list[str] | str) -> Modules:
    return re.compile(modules) if isinstance(modules, str) else tuple(modules)


def _listed(modules: Modules) -> tuple[str, ...]:
    return modules if isinstance(modules, tuple) else ()


def _matches(modules: Modules, module: str) -> bool:
    """Match as PEFT matches `target_modules` and `exclude_modules`."""
    if isinstance(modules, re.Pattern):
        return modules.fullmatch(module) is not None
    return any(module == name or module.endswith("." + name) for name in modules)


def _found(pattern: Mapping[str, V], module: str, default: V) -> V:
    """Look a module up as PEFT does in `rank_pattern` and `alpha_pattern`."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(field: str, value: object, fine: Callable[[float], bool], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not fine(value):
        raise ConfigError(f"LoRA {field} must be {wanted}; got {value!r}.", field=field)


def _modules(field: str, value: object) -> None:
    if isinstance(value, re.Pattern):
        _no_flags(field, cast("re.Pattern[str]", value))
        return
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in cast("tuple[object, ...]", value)):
        raise ConfigError(
            f"{field} must be a tuple of names or a compiled regular expression; got {value!r}.", field=field
        )
    names = cast("tuple[str, ...]", value)
    if len(set(names)) != len(names):
        raise ConfigError(f"{field} names a module twice: {names!r}.", field=field)
    for name in names:
        _known(field, name, name.rsplit(".", 1)[-1])


def _no_flags(field: str, value: re.Pattern[str]) -> None:
    """Refuse flags that are not in the text, which is all that an adapter folder stores."""
    if value.flags != re.compile(value.pattern).flags:
        raise ConfigError(
            f"{field} must have its flags in the regular expression, such as '(?i)' for re.IGNORECASE; got {value!r}.",
            field=field,
        )


def _pattern(field: str, value: object, fine: Callable[[float], bool], wanted: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field} must map regular expressions to numbers; got {value!r}.", field=field)
    for key, number in cast("Mapping[str, object]", value).items():
        try:
            re.compile(key)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{field} has {key!r}, which is not a regular expression: {error}.", field=field
            ) from error
        _number(field, number, fine, wanted)


def _known(field: str, name: str, last: str) -> None:
    if last not in TARGETS:
        raise ConfigError(
            f"Unknown module {name!r} in {field}; known are {', '.join(TARGETS)}.{suggestion(last, TARGETS)}",
            field=field,
        )
