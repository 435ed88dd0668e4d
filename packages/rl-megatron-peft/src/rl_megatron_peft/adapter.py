"""Adapter folders in the format of Hugging Face PEFT, read and written without torch.

    adapter_config.json            rank, alpha, targets: PEFT's LoraConfig as JSON
    adapter_model.safetensors      base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight [out, rank]; of DoRA also
                                   .lora_magnitude_vector [out]
    adapter_manifest.json          size and sha256 of both, fingerprint of the base; ours, PEFT does not look at it; written last

A folder appears whole or not at all: it is written beside its place and renamed. A folder with a manifest is checked against it; one
without (made by PEFT) is checked for itself: rank, targets, names, shapes and element types must agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.naming import HFModule
from rl_megatron_peft.writing import new_folder
from rl_protocol.errors import ConfigError, SchemaError
from rl_protocol.weights import WeightTensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "adapter_manifest.json"
PREFIX = "base_model.model."

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _DTYPES.items()}
_SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "magnitude"}
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_rslora": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
"""Field of adapter_config.json -> values that mean it is not used; any other value changes the adapter in a way this reader would lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """The two factors of one module: `a` [rank, in] and `b` [out, rank], of one element type; with DoRA also `magnitude` [out], the lengths of
    the rows of the weight that it amounts to."""

    a: WeightTensor
    b: WeightTensor
    magnitude: WeightTensor | None = None

    def tensors(self) -> dict[str, WeightTensor]:
        """Those that there are, by name of the attribute."""
        named = {"a": self.a, "b": self.b, "magnitude": self.magnitude}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter of a model.

    Attributes:
        base_model: name or path of the model it was made for; empty: not known.
        config: rank, alpha and targets.
        pairs: full Hugging Face module name -> its factors.
        fingerprint: of the base model's weights (see `rl_megatron_peft.base_model`), kept in the manifest; empty: not known.
    """

    base_model: str
    config: LoraConfig
    pairs: Mapping[str, LoraPair]
    fingerprint: str = ""


def verify_adapter(adapter: Adapter, file: str = WEIGHTS_FILE) -> None:
    """Check that the factors are what the configuration says: targets, completeness over the layers, shapes, element types.

    Raises:
        AdapterError: names the file and the module or tensor.
    """
    config = adapter.config
    if not adapter.pairs:
        raise _bad(file, "pairs", "holds no adapter at all")
    layers: set[int] = set()
    for module, pair in adapter.pairs.items():
        try:
            layers.add(HFModule.parse(module).layer)
        except ConfigError as error:
            raise _bad(file, module, str(error)) from error
        if not config.covers(module):
            raise _bad(
                file,
                module,
                f"is adapted, but target_modules is {list(config.target_modules)}, exclude {list(config.exclude)}",
            )
        _verify_pair(file, module, pair, config)
    wanted = [HFModule(layer, name).name for layer in sorted(layers) for name in config.target_modules]
    for module in wanted:
        if config.covers(module) and module not in adapter.pairs:
            raise _bad(
                file, module, "is a target of the configuration and has no adapter, though others of its layer have"
            )
    for name in config.target_modules:
        if not any(module.endswith("." + name) for module in adapter.pairs):
            raise _bad(file, "target_modules", f"names {name!r}, but no module of that name is adapted")


def _verify_pair(file: str, module: str, pair: LoraPair, config: LoraConfig) -> None:
    rank = config.rank
    for side, tensor, axis in (("lora_A", pair.a, 0), ("lora_B", pair.b, 1)):
        field = f"{module}.{side}"
        if tensor.dtype not in _CODES:
            raise _bad(file, field, f"is of type {tensor.dtype}; adapters are {', '.join(_CODES)}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise _bad(file, field, f"has shape {tensor.shape}; expected two dimensions, neither empty")
        if tensor.shape[axis] != rank:
            raise _bad(file, field, f"has shape {tensor.shape}, but r is {rank}: dimension {axis} must be {rank}")
    if pair.a.dtype != pair.b.dtype:
        raise _bad(file, module, f"has factors of two types, {pair.a.dtype} and {pair.b.dtype}")
    _verify_magnitude(file, f"{module}.lora_magnitude_vector", pair, config)


def _verify_magnitude(file: str, field: str, pair: LoraPair, config: LoraConfig) -> None:
    magnitude = pair.magnitude
    if (magnitude is not None) != config.use_dora:
        raise _bad(file, field, f"is {'missing' if config.use_dora else 'there'}, but use_dora is {config.use_dora}")
    if magnitude is None:
        return
    if magnitude.dtype not in _CODES:
        raise _bad(file, field, f"is of type {magnitude.dtype}; adapters are {', '.join(_CODES)}")
    if magnitude.shape != pair.b.shape[:1]:
        raise _bad(file, field, f"has shape {magnitude.shape}, but lora_B has {pair.b.shape[0]} rows")


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write a new adapter folder, whole or not at all. A folder that exists is never touched.

    Raises:
        AdapterError: the adapter contradicts itself; nothing is written.
        OutputError: `path` exists or can't be written.
    """
    verify_adapter(adapter, "the adapter to be written")
    new_folder(path, lambda folder: write_files(folder, adapter))


def write_files(folder: Path, adapter: Adapter) -> list[Path]:
    """Write the files of an adapter into a folder that is empty and that the caller makes appear whole; returns them.

    Raises:
        AdapterError: the adapter contradicts itself; nothing is written.
        OSError: a file can't be written.
    """
    verify_adapter(adapter, "the adapter to be written")
    sums = {
        WEIGHTS_FILE: _write(folder / WEIGHTS_FILE, _weights_bytes(adapter)),
        CONFIG_FILE: _write(folder / CONFIG_FILE, _json_bytes(_config_fields(adapter))),
    }
    _write(folder / MANIFEST_FILE, _json_bytes({"version": 1, "files": sums, "base_model": adapter.fingerprint}))
    return [folder / name for name in (*sums, MANIFEST_FILE)]


def tensors_of(adapter: Adapter) -> dict[str, WeightTensor]:
    """The tensors by the names they have in PEFT's files: `base_model.model.<module>.lora_A.weight`, for instance."""
    suffix = {side: suffix for suffix, side in _SIDES.items()}
    return {
        f"{PREFIX}{module}{suffix[side]}": tensor
        for module in sorted(adapter.pairs)
        for side, tensor in adapter.pairs[module].tensors().items()
    }


def read_adapter(path: Path) -> Adapter:
    """Read and verify an adapter folder; the tensors are views of the bytes read.

    Raises:
        AdapterError: a file is missing, damaged, or contradicts another; names file and field.
    """
    config_bytes, weights_bytes = (_read(path / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
    fingerprint = ""
    if (path / MANIFEST_FILE).exists():
        fingerprint = _check_manifest(path, {CONFIG_FILE: config_bytes, WEIGHTS_FILE: weights_bytes})
    fields = _json_object(path / CONFIG_FILE, config_bytes)
    config = _config_from(str(path / CONFIG_FILE), fields)
    pairs = _pairs_from(str(path / WEIGHTS_FILE), weights_bytes)
    base_model = str(fields.get("base_model_name_or_path") or "")
    adapter = Adapter(base_model=base_model, config=config, pairs=pairs, fingerprint=fingerprint)
    verify_adapter(adapter, str(path / WEIGHTS_FILE))
    return adapter


# -- configuration


def _config_fields(adapter: Adapter) -> dict[str, object]:
    config = adapter.config
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": adapter.base_model or None,
        "bias": "none",
        "exclude_modules": list(config.exclude) or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(config.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": config.use_dora,
        "use_rslora": False,
    }


def _config_from(file: str, fields: Mapping[str, Any]) -> LoraConfig:
    if fields.get("peft_type") != "LORA":
        raise _bad(file, "peft_type", f"must be 'LORA'; got {fields.get('peft_type')!r}")
    for field, unused in _NOT_SUPPORTED.items():
        if fields.get(field) not in unused:
            raise _bad(file, field, f"is {fields[field]!r}, which this reader can't honour; expected {unused[-1]!r}")
    exclude = fields.get("exclude_modules")
    try:
        return LoraConfig(
            rank=_typed(file, fields, "r", int),
            alpha=float(_typed(file, fields, "lora_alpha", int, float)),
            dropout=float(_typed(file, fields, "lora_dropout", int, float)),
            target_modules=tuple(_typed(file, fields, "target_modules", list)),
            exclude=() if exclude is None else tuple(_typed(file, fields, "exclude_modules", list)),
            use_dora=_flag(file, fields, "use_dora"),
        )
    except (ConfigError, OverflowError) as error:
        ours = getattr(error, "field", "alpha")
        theirs = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "exclude": "exclude_modules"}
        raise _bad(file, theirs.get(ours, ours), str(error)) from error


def _flag(file: str, fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise _bad(file, field, f"must be true or false; got {value!r}")
    return bool(value)


def _typed(file: str, fields: Mapping[str, Any], field: str, *kinds: type) -> Any:
    if field not in fields:
        raise _bad(file, field, "is missing")
    value = fields[field]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise _bad(file, field, f"must be {' or '.join(kind.__name__ for kind in kinds)}; got {value!r}")
    return value


# -- tensors


def _weights_bytes(adapter: Adapter) -> list[bytes | memoryview]:
    """A safetensors file as buffers: length of the header as 8 bytes little-endian, JSON header padded with spaces to 8, tensors without gaps."""
    tensors = tensors_of(adapter)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return [len(text).to_bytes(8, "little"), text, *(tensor.data.data for tensor in tensors.values())]


def _pairs_from(file: str, raw: bytes) -> dict[str, LoraPair]:
    try:
        entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(raw)  # pyright: ignore[reportAssignmentType]
    except safetensors.SafetensorError as error:
        raise _bad(file, "header", f"is not a safetensors header: {error}") from error
    halves: dict[str, dict[str, WeightTensor]] = {}
    for name, entry in entries:
        suffix = next((s for s in _SIDES if name.endswith(s)), None)
        if suffix is None or not name.startswith(PREFIX):
            raise _bad(
                file,
                name,
                f"is not named like '{PREFIX}<module>.lora_A.weight', '.lora_B.weight' or '.lora_magnitude_vector'",
            )
        module = name[len(PREFIX) : -len(suffix)]
        halves.setdefault(module, {})[_SIDES[suffix]] = _tensor(file, name, entry)
    for module, sides in halves.items():
        for suffix, side in _SIDES.items():
            if side not in sides and side != "magnitude":
                raise _bad(file, f"{PREFIX}{module}{suffix}", "is missing while the module's other factor is there")
    return {module: LoraPair(**sides) for module, sides in sorted(halves.items())}


def _tensor(file: str, name: str, entry: Mapping[str, Any]) -> WeightTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise _bad(file, name, f"is of type {entry['dtype']}; adapters are {', '.join(_DTYPES)}")
    try:
        return WeightTensor(name, dtype, tuple(entry["shape"]), np.frombuffer(entry["data"], dtype=np.uint8))
    except SchemaError as error:
        raise _bad(file, name, str(error)) from error


# -- files


def _bad(file: str, field: str, why: str) -> AdapterError:
    return AdapterError(f"{file}: {field} {why}.", file=file, field=field)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _bad(str(file), "file", f"can't be read: {error.strerror or error}") from error


def _json_bytes(value: object) -> list[bytes | memoryview]:
    return [(json.dumps(value, indent=2, sort_keys=True) + "\n").encode()]


def _json_object(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad(str(file), "file", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _bad(str(file), "file", f"must hold a JSON object; got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _write(file: Path, parts: list[bytes | memoryview]) -> dict[str, object]:
    """Write and flush to disk; returns what the manifest says of the file."""
    digest = hashlib.sha256()
    size = 0
    with file.open("xb") as out:
        for part in parts:
            out.write(part)
            digest.update(part)
            size += len(part)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _check_manifest(path: Path, contents: Mapping[str, bytes]) -> str:
    """That the files are those it was written for; returns the fingerprint of the base model."""
    file = path / MANIFEST_FILE
    manifest = _json_object(file, _read(file))
    if manifest.get("version") != 1:
        raise _bad(str(file), "version", f"must be 1; got {manifest.get('version')!r}")
    files = _typed(str(file), manifest, "files", dict)
    for name, raw in contents.items():
        want = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        if files.get(name) != want:
            raise _bad(
                str(path / name), "file", f"is not what {MANIFEST_FILE} says: expected {files.get(name)}, got {want}"
            )
    return str(manifest.get("base_model", ""))
