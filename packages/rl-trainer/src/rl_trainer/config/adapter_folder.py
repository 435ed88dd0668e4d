"""PEFT folders that training starts from, compared with `LoraConfig` without torch or peft."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from rl_protocol import ConfigError
from rl_protocol.support.peft_config import HEADS, PICKLED, PICKLED_FILE, VALUE_HEAD, unread_field
from rl_trainer.config.lora import ALL_LINEAR, EXPERT_PARAMETERS, LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<side>lora_A|lora_B|lora_magnitude_vector)(?:\.weight|(?<=vector))"
)
_HEAD_NAME = re.compile(rf"base_model\.model\.(?P<module>{VALUE_HEAD})\.(?P<side>weight|bias)")
_EXPERTS = re.compile(r"(?P<module>.+\.experts)(?P<inner>(\.base_layer)*)")
"""Modules of peft that adapt the parameters of experts: nested, the first is the innermost."""
_OF_EXPERT = re.compile(r"(?P<module>.+\.experts)\.\d+\.(?P<part>\w+)")
_LONGEST_HEADER = 100_000_000
_EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Element type that every engine reads -> its bits, and those of the exponent, which are all 1 in
NaN and infinity."""
_INDEX_FILE = "adapter_model.safetensors.index.json"
_SAME = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Field of PEFT -> the option that must have its value."""
_CHOOSE_MODULES = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that choose modules, which the names of the tensors tell."""
Shape = Sequence[int]


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_adapter(config: LoraConfig, matrices: Mapping[str, Shape] | None = None, *, value_head: bool = False) -> None:
    """Check that the adapter in `config.adapter_path` is one that these options would make.

    Args:
        config: options of the adapters, with a path.
        matrices: full name of each linear module of the base model -> its shape [out, in]. Those of
            experts may be joined: `mlp.experts.down_proj` -> [experts, out, in]. None: unknown, so
            the adapter is compared with the options alone.
        value_head: the adapter is for a critic, so the folder may also hold its value head: `score`
            of AutoModelForTokenClassification, or of AutoModelForSequenceClassification, with one
            label.

    Raises:
        ConfigError: the folder can't be read, holds something else than a LoRA adapter, has a field
            that changes what the adapter computes and is not supported, has NaN or infinity, or
            differs from the options or the base model; names the field or the option.
    """
    folder = Path(config.adapter_path).expanduser()
    fields = _fields(folder, config.adapter_path)
    _check_fields(config, fields, folder / CONFIG_FILE, value_head=value_head)
    found = _with_parameters(read_shapes(folder, value_head=value_head), fields, folder)
    _check_head(found.pop(VALUE_HEAD, {}), matrices, folder / WEIGHTS_FILE)
    _check_named(fields, found, folder)
    _check_modules(config, found, None if matrices is None else join_expert_shapes(matrices))
    _check_finite(folder / WEIGHTS_FILE)


def adapter_options(path: str, *, value_head: bool = False) -> dict[str, Any]:
    """Read the values of `LoraConfig` that an adapter was made with.

    Args:
        path: as `LoraConfig.adapter_path`.
        value_head: see `check_adapter`.

    Returns:
        rank, alpha, use_rslora, use_dora and target_modules, without those that are at PEFT's
        defaults. `exclude` depends on the base model: `check_adapter` names modules to exclude.

    Raises:
        ConfigError: see `check_adapter`.
    """
    folder = Path(path).expanduser()
    fields = _fields(folder, path)
    _check_kind(fields, folder / CONFIG_FILE, value_head=value_head)
    found = _with_parameters(read_shapes(folder, value_head=value_head), fields, folder)
    found.pop(VALUE_HEAD, {})
    _check_named(fields, found, folder)
    modules = {part for name in found for part in _parts(name)}
    kind: dict[str, Any] = {option: fields[field] for field, option in _SAME.items() if fields.get(field)}
    return kind | {"target_modules": sorted(modules)}


def read_shapes(folder: Path, *, value_head: bool = False) -> dict[str, dict[str, Shape]]:
    """Full module name in peft -> lora_A, lora_B, with DoRA lora_magnitude_vector -> shape of the
    tensor.

    With `value_head` also "score" -> weight, bias, as far as the folder has them.

    Raises:
        ConfigError: the file of the tensors can't be read, or holds other tensors.
    """
    file = folder / WEIGHTS_FILE
    found: dict[str, dict[str, Shape]] = {}
    for name, entry in _header(file)[1].items():
        match = _NAME.fullmatch(name) or (_HEAD_NAME.fullmatch(name) if value_head else None)
        if match is None:
            raise ConfigError(
                f"LoraConfig.adapter_path: {file} has the tensor {name}; only lora_A, lora_B and lora_magnitude_vector of linear modules are read."
            )
        if entry.dtype not in _EXPONENTS:
            raise ConfigError(
                f"LoraConfig.adapter_path: {file}: {name} must be of type {', '.join(_EXPONENTS)}; got {entry.dtype}."
            )
        found.setdefault(match["module"], {})[match["side"]] = entry.shape
    return found


def _check_finite(file: Path) -> None:
    """Check that no tensor has NaN or infinity, which would make all outputs NaN."""
    start, header = _header(file)
    raw = np.memmap(file, np.uint8, "r", start)
    for name, entry in header.items():
        bits, exponent = _EXPONENTS[entry.dtype]
        data = raw[slice(*entry.data_offsets)]
        if len(data) != math.prod(entry.shape) * np.dtype(bits).itemsize:
            raise ConfigError(
                f"LoraConfig.adapter_path: {file}: {name} of {list(entry.shape)} in {entry.dtype} has {len(data)} bytes; copy the file again."
            )
        values = data.view(bits)
        if bool(((values & exponent) == exponent).any()):
            raise ConfigError(
                f"LoraConfig.adapter_path: {file}: {name} has values that are NaN or infinite; give an adapter from before its training diverged."
            )


def _header(file: Path) -> tuple[int, dict[str, _Entry]]:
    """Where tensors begin, and name -> entry of each, of a file that is as long as they say."""
    if (file.parent / _INDEX_FILE).exists() and not file.exists():
        raise ConfigError(
            f"LoraConfig.adapter_path: {file.parent} holds tensors in several files ({_INDEX_FILE}); join them in one {WEIGHTS_FILE}."
        )
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            listed: dict[str, Any] = json.loads(opened.read(min(size, _LONGEST_HEADER)))
        listed.pop("__metadata__", None)
        header = msgspec.convert(listed, dict[str, _Entry])
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"LoraConfig.adapter_path: {file} is no readable safetensors file: {error}") from error
    length = 8 + size + max((entry.data_offsets[1] for entry in header.values()), default=0)
    if (found := file.stat().st_size) != length:
        raise ConfigError(
            f"LoraConfig.adapter_path: {file} has {found} bytes, and its header describes {length}; copy it again."
        )
    return 8 + size, header


def _with_parameters(
    found: Mapping[str, dict[str, Shape]], fields: Mapping[str, Any], folder: Path
) -> dict[str, dict[str, Shape]]:
    """Replace peft's modules of experts by the parameters that they adapt, such as
    `mlp.experts.down_proj`."""
    chosen = tuple(f".{name}" for name in fields.get("target_parameters") or ())
    named: dict[str, dict[str, Shape]] = {}
    for name, shapes in found.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            named[name] = shapes
            continue
        parameters = [f"{match['module']}.{last}" for last in EXPERT_PARAMETERS]
        adapted = [one for one in parameters if f".{one}".endswith(chosen)]
        depth = match["inner"].count(".")
        if depth >= len(adapted):
            raise ConfigError(
                f"LoraConfig.adapter_path: {folder / WEIGHTS_FILE} has an adapter of {name}, and target_parameters in {CONFIG_FILE} "
                f"names {len(adapted)} parameters of this module; got {fields.get('target_parameters')}."
            )
        named[adapted[len(adapted) - 1 - depth]] = shapes
    return named


def join_expert_shapes(matrices: Mapping[str, Shape]) -> dict[str, Shape]:
    """Join the shapes of linear modules of experts; see `matrices` of `check_adapter`."""
    found: dict[str, Shape] = {}
    part_of = {part: name for name, parts in EXPERT_PARAMETERS.items() for part in parts}
    for name, shape in matrices.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None or match["part"] not in part_of:
            found[name] = shape
            continue
        last = part_of[match["part"]]
        parts, joined = EXPERT_PARAMETERS[last], f"{match['module']}.{last}"
        experts = found.get(joined, (0,))[0] + (match["part"] == parts[0])
        found[joined] = (experts, len(parts) * shape[0], shape[1])
    return found


def _parts(name: str) -> tuple[str, ...]:
    """The targets of `LoraConfig` that a module or a parameter of experts consists of."""
    last = name.rpartition(".")[2]
    return EXPERT_PARAMETERS.get(last, (last,))


def _fields(folder: Path, given: str) -> dict[str, Any]:
    """The JSON object of `adapter_config.json`."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        if inside := sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}")):
            raise ConfigError(
                f"LoraConfig.adapter_path={given!r} holds no adapter itself, but {', '.join(inside)} inside; name the folder of one."
            )
        raise ConfigError(
            f"LoraConfig.adapter_path={given!r} must be a PEFT folder; it has no {CONFIG_FILE}. Give a folder that save_pretrained of peft, "
            "or a run with LoraConfig.rank above 0, has written. `rl-megatron-peft convert` makes one from a Megatron checkpoint, also from verl's "
            "old adapter_checkpoint."
        )
    if (folder / PICKLED_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
        raise ConfigError(f"LoraConfig.adapter_path: {folder / PICKLED_FILE} {PICKLED}.")
    try:
        fields: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"LoraConfig.adapter_path: {file} can't be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"LoraConfig.adapter_path: {file} must hold a JSON object; got {type(fields).__name__}.")
    return cast("dict[str, Any]", fields)


def _check_kind(fields: Mapping[str, Any], file: Path, *, value_head: bool) -> None:
    if fields.get("peft_type") != "LORA":
        raise ConfigError(
            f"LoraConfig.adapter_path: {file} has peft_type={fields.get('peft_type')!r}; adapters of peft_type='LORA' are read."
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"LoraConfig.adapter_path: {file}: r must be an integer of at least 1; got {rank!r}.")
    if type(alpha) not in (int, float) or not 0 < float(cast("float", alpha)) < math.inf:
        raise ConfigError(f"LoraConfig.adapter_path: {file}: lora_alpha must be a number above 0; got {alpha!r}.")
    lost = unread_field(fields, (*_SAME, *_CHOOSE_MODULES), HEADS if value_head else ())
    if lost is not None:
        field, why = lost
        raise ConfigError(f"LoraConfig.adapter_path: {file}: {field} {why}.")
    parameters: object = fields.get("target_parameters") or []
    listed = cast("list[object]", parameters) if isinstance(parameters, list) else [None]
    if not all(isinstance(name, str) and name.rpartition(".")[2] in EXPERT_PARAMETERS for name in listed):
        raise ConfigError(
            f"LoraConfig.adapter_path: {file}: target_parameters is {parameters!r}; supported are those of experts, "
            f"{' and '.join(EXPERT_PARAMETERS)}."
        )


def _check_fields(config: LoraConfig, fields: Mapping[str, Any], file: Path, *, value_head: bool) -> None:
    _check_kind(fields, file, value_head=value_head)
    for field, option in _SAME.items():
        theirs, ours = fields.get(field) or 0, getattr(config, option)
        if theirs != ours:
            wanted = bool(theirs) if isinstance(ours, bool) else theirs
            raise ConfigError(f"LoraConfig.{option} must be {wanted}, as {field} in {file}; got {ours}.")


def _check_named(fields: Mapping[str, Any], found: Collection[str], folder: Path) -> None:
    """Check that `target_modules` names the modules with tensors; peft ignores those of others.

    The parameters of experts are those that `target_parameters` names.
    """
    targets: object = fields.get("target_modules")
    if targets is None:
        return
    for module in found:
        if _is_of_experts(module):
            continue
        if isinstance(targets, list):
            named = any(module == name or module.endswith(f".{name}") for name in cast("list[object]", targets))
        else:
            named = targets == ALL_LINEAR or _matches(str(targets), module, folder / CONFIG_FILE)
        if not named:
            raise ConfigError(
                f"LoraConfig.adapter_path: {folder / WEIGHTS_FILE} has an adapter of {module}, which target_modules in {CONFIG_FILE} does not name: "
                "peft ignores it. Name it, or remove its tensors."
            )


def _matches(pattern: str, module: str, file: Path) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ConfigError(
            f"LoraConfig.adapter_path: {file}: target_modules is {pattern!r}, which is no regular expression: {error}."
        ) from error


def _check_head(head: Mapping[str, Shape], matrices: Mapping[str, Shape] | None, file: Path) -> None:
    """Check that a value head has one value per token, and the base model's hidden size."""
    weight, bias = head.get("weight"), head.get("bias", (1,))
    if not head:
        return
    hidden = (matrices or {}).get(VALUE_HEAD, (1, None))[1]
    if weight is None or len(weight) != 2 or weight[0] != 1 or hidden not in (None, weight[1]) or tuple(bias) != (1,):
        raise ConfigError(
            f"LoraConfig.adapter_path: {file}: {VALUE_HEAD} must have a weight of (1, {hidden or 'hidden size'}), and a bias of (1,) or none: "
            f"one label, the value; got {dict(head)}."
        )


def _check_modules(
    config: LoraConfig, found: Mapping[str, Mapping[str, Shape]], matrices: Mapping[str, Shape] | None
) -> None:
    sides = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if config.use_dora else set[str]())
    for module, shapes in found.items():
        if not config.covers_weight(module):
            raise ConfigError(
                f"LoraConfig.target_modules must name {', '.join(_parts(module))}, and LoraConfig.exclude must not name it: the adapter in "
                f"LoraConfig.adapter_path has {module}; got {', '.join(config.target_modules)}."
            )
        experts = _num_experts(module, shapes, config.rank, matrices)
        if set(shapes) != sides or (shapes["lora_A"][0], shapes["lora_B"][1]) != (experts * config.rank,) * 2:
            of_experts = f" for each of {experts} experts" if experts > 1 else ""
            raise ConfigError(
                f"LoraConfig.adapter_path: the adapter of {module} must have {', '.join(sorted(sides))} of rank {config.rank}{of_experts}; "
                f"got {dict(shapes)}."
            )
    lacking = set(config.targets()) - {part for name in found for part in _parts(name)}
    wanted = {name for name in matrices or () if config.covers_weight(name)}
    if matrices is not None:
        _check_base(found, matrices)
    if lacking or wanted - found.keys():
        one = sorted(wanted - found.keys() or lacking)[0]
        others = [*config.exclude, *sorted(wanted - found.keys())]
        remedy = (
            f"Name the modules that it has: {', '.join(name for name in config.targets() if name not in lacking)}."
            if lacking
            else f"Leave out those that it does not have: LoraConfig.exclude=[{','.join(others)}]."
        )
        raise ConfigError(
            f"LoraConfig.target_modules names {one.rpartition('.')[2]}, for which the adapter in LoraConfig.adapter_path has no tensors ({one}). "
            f"{remedy}"
        )


def _is_of_experts(name: str) -> bool:
    """Whether it is a parameter of experts, of those that `_with_parameters` finds."""
    return name.rpartition(".")[0].endswith(".experts")


def _num_experts(module: str, shapes: Mapping[str, Shape], rank: int, matrices: Mapping[str, Shape] | None) -> int:
    """Experts whose factors an adapter joins, by the base model, or else by its own shapes."""
    if not _is_of_experts(module):
        return 1
    base = (matrices or {}).get(module, ())
    rows = shapes["lora_A"][0] if "lora_A" in shapes else 0
    return base[0] if len(base) == 3 else max(1, rows // rank)


def _check_base(found: Mapping[str, Mapping[str, Shape]], matrices: Mapping[str, Shape]) -> None:
    for module, shapes in found.items():
        if module not in matrices:
            raise ConfigError(
                f"LoraConfig.adapter_path has an adapter of {module}, which the base model does not have; set the base that it was trained on."
            )
        of_adapter = shapes["lora_B"][0], shapes["lora_A"][1]
        if of_adapter != tuple(matrices[module])[-2:]:
            raise ConfigError(
                f"LoraConfig.adapter_path has an adapter of {module} for a weight of {of_adapter}, and the base model's is "
                f"{tuple(matrices[module])[-2:]}; set the base that it was trained on."
            )
