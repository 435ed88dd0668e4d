"""Convert LoraConfig to and from PEFT's `adapter_config.json`.

Every field is applied, has no effect, or is refused: none is silently lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from rl_megatron_peft.base_model.experts import EXPERT_PARAMETERS, ExpertParameter
from rl_megatron_peft.base_model.naming import FUSED, TARGETS, HFModule
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.lora_config import LoraConfig, Modules
from rl_protocol.errors import ConfigError
from rl_protocol.support.peft_config import HEADS, unread_field

HONORED = frozenset(
    {
        "alpha_pattern",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_dora",
        "use_rslora",
    }
)
_PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "exclude": "exclude_modules"}
_ALL_LINEAR = "all-linear"


def to_peft(config: LoraConfig, base_model: str, adapted: Collection[str]) -> dict[str, object]:
    """Return the fields of `adapter_config.json`.

    Args:
        config: settings of the adapter.
        base_model: its name or path; empty if unknown.
        adapted: full names of its modules and of its parameters of experts. The latter are listed
            in `target_parameters` alone: PEFT changes the rank of those in `target_modules`.
    """
    parameters = sorted(name for name in adapted if ExpertParameter.parse(name))
    fields: dict[str, object] = {
        "alpha_pattern": {key: _integral(alpha) for key, alpha in config.alpha_pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base_model or None,
        "bias": "none",
        "exclude_modules": _listed(config.exclude) or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _integral(config.alpha),
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": _outside_experts(config.target_modules, adapted, others=bool(parameters)),
        "task_type": "CAUSAL_LM",
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    }
    return fields | {"target_parameters": parameters} if parameters else fields


def from_peft(file: str, fields: Mapping[str, Any], *, value_head: bool = False) -> LoraConfig:
    """Build a LoraConfig from the fields of `adapter_config.json`.

    With `value_head` `modules_to_save` may name the head of a model for classification.

    Raises:
        AdapterError: the method is not LoRA, a value is wrong, or a field changes the adapter in a
            way that LoraConfig can't express; names file and field.
    """
    if fields.get("peft_type") != "LORA":
        raise bad_file(file, "peft_type", f"must be 'LORA'; got {fields.get('peft_type')!r}")
    lost = unread_field(fields, HONORED, HEADS if value_head else ())
    if lost is not None:
        raise bad_file(file, *lost)
    try:
        return LoraConfig(
            rank=required_field(file, fields, "r", int),
            alpha=float(required_field(file, fields, "lora_alpha", int, float)),
            dropout=float(required_field(file, fields, "lora_dropout", int, float)),
            target_modules=_targets(file, fields),
            exclude=_excluded(file, fields),
            use_dora=_flag(file, fields, "use_dora"),
            use_rslora=_flag(file, fields, "use_rslora"),
            rank_pattern=_optional(file, fields, "rank_pattern", dict) or {},
            alpha_pattern=_optional(file, fields, "alpha_pattern", dict) or {},
        )
    except (ConfigError, OverflowError) as error:
        field = getattr(error, "field", "alpha")
        raise bad_file(file, _PEFT_NAMES.get(field, field), str(error)) from error


def required_field(file: str, fields: Mapping[str, Any], field: str, *kinds: type) -> Any:
    """Return a required field of one of these types.

    Raises:
        AdapterError: the field is missing or of another type; names file and field.
    """
    if field not in fields:
        raise bad_file(file, field, "is missing")
    value = fields[field]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise bad_file(file, field, f"must be {' or '.join(kind.__name__ for kind in kinds)}; got {value!r}")
    return value


# -- fields


def _integral(alpha: float) -> float:
    return int(alpha) if float(alpha).is_integer() else alpha


def _listed(modules: Modules) -> list[str] | str:
    return list(modules) if isinstance(modules, tuple) else modules.pattern


def _outside_experts(modules: Modules, adapted: Collection[str], *, others: bool) -> list[str] | str:
    """Return the targets outside of experts of an adapter, which has `others` of experts or none.

    Names that no adapter has are left out: PEFT takes them for those of experts, also where
    `exclude_modules` has these.
    """
    outside = sorted(name for name in adapted if not ExpertParameter.parse(name))
    if not isinstance(modules, tuple):
        return outside if others else modules.pattern
    return [name for name in modules if any(one == name or one.endswith(f".{name}") for one in outside)]


def _targets(file: str, fields: Mapping[str, Any]) -> Modules:
    """Read `target_modules` and `target_parameters`."""
    parameters = _target_parameters(file, fields)
    if parameters and fields.get("target_modules") is None:
        return parameters
    modules = _target_modules(file, fields)
    if not parameters:
        return modules
    if not isinstance(modules, tuple):
        raise bad_file(
            file, "target_parameters", "can't be used where target_modules is a regular expression; list the modules"
        )
    return tuple(dict.fromkeys((*modules, *parameters)))


def _target_parameters(file: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Read `target_parameters` as the modules of experts whose rows they hold."""
    found: list[str] = []
    for name in _names(file, "target_parameters", _optional(file, fields, "target_parameters", list) or []):
        module, _, last = name.rpartition(".")
        if last not in EXPERT_PARAMETERS or not f".{module}".endswith((".", ".experts")):
            raise bad_file(
                file,
                "target_parameters",
                f"names {name!r}, which this reader does not support; it reads mlp.experts.gate_up_proj and mlp.experts.down_proj",
            )
        found += [f"{module or 'experts'}.{logical}" for logical in FUSED[EXPERT_PARAMETERS[last]]]
    return tuple(found)


def _target_modules(file: str, fields: Mapping[str, Any]) -> Modules:
    """Read `target_modules`, limited to the layers in `layers_to_transform` if it is set."""
    value = required_field(file, fields, "target_modules", list, str)
    layers = _layers(file, fields)
    if isinstance(value, str):
        if layers is not None:
            raise bad_file(file, "layers_to_transform", "can't be used where target_modules is a regular expression")
        return TARGETS if value.lower() == _ALL_LINEAR else _expression(file, "target_modules", value)
    names = _names(file, "target_modules", value)
    return names if layers is None else _in_layers(file, fields, names, layers)


def _layers(file: str, fields: Mapping[str, Any]) -> frozenset[int] | None:
    value = _optional(file, fields, "layers_to_transform", list, int)
    layers: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers):
        raise bad_file(file, "layers_to_transform", f"must hold layer numbers from 0; got {value!r}")
    return frozenset(cast("list[int]", layers)) or None


def _in_layers(file: str, fields: Mapping[str, Any], names: tuple[str, ...], layers: frozenset[int]) -> tuple[str, ...]:
    """Return the full names of the target modules in these layers.

    As in PEFT, `layers_pattern` says which number in a name is the layer's, and a target given by
    its full name is kept whatever its layer.
    """
    value = _optional(file, fields, "layers_pattern", list, str) or []
    patterns = [value] if isinstance(value, str) else _names(file, "layers_pattern", value)
    numbers = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    compiled = [_expression(file, "layers_pattern", number) for number in numbers]
    listed = LoraConfig(target_modules=names)
    found = [name for name in names if name.startswith("model.layers.")]
    for layer in sorted(layers):
        for logical in TARGETS:
            module = HFModule(layer, logical).name
            match = next((match for number in compiled if (match := number.match(module))), None)
            if match and int(match[1]) in layers and listed.covers(module) and module not in found:
                found.append(module)
    if not found:
        raise bad_file(file, "layers_to_transform", f"is {sorted(layers)}, which leaves no module of target_modules")
    return tuple(found)


def _excluded(file: str, fields: Mapping[str, Any]) -> Modules:
    """Read `exclude_modules` without names that are never targets here, such as `lm_head`."""
    value = _optional(file, fields, "exclude_modules", list, str)
    if isinstance(value, str) and value:
        return _expression(file, "exclude_modules", value)
    names = _names(file, "exclude_modules", value or [])
    return tuple(name for name in names if name.rsplit(".", 1)[-1] in TARGETS)


def _names(file: str, field: str, value: Sequence[Any]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in value):
        raise bad_file(file, field, f"must hold names; got {value!r}")
    return tuple(value)


def _expression(file: str, field: str, value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except re.error as error:
        raise bad_file(file, field, f"is {value!r}, which is not a regular expression: {error}") from error


def _flag(file: str, fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise bad_file(file, field, f"must be true or false; got {value!r}")
    return bool(value)


def _optional(file: str, fields: Mapping[str, Any], field: str, *kinds: type) -> Any:
    return None if fields.get(field) is None else required_field(file, fields, field, *kinds)
