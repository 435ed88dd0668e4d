"""Adapter folders in the format of Hugging Face PEFT, read and written without torch.

    adapter_config.json        rank, alpha, targets: PEFT's LoraConfig as JSON
    adapter_model.safetensors  base_model.model.<module>.lora_A.weight [rank, in],
                               .lora_B.weight [out, rank], with DoRA .lora_magnitude_vector [out];
                               for a parameter of experts [experts * rank, in] and
                               [out, rank * experts]
    adapter_manifest.json      size and sha256 of both files, fingerprint of the base model; written
                               last, ignored by PEFT

A folder appears complete or not at all. A folder that is read must agree in rank, targets, names,
shapes and element types, and with the checksums of its manifest if it has one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rl_megatron_peft.base_model.experts import EXPERT_PARAMETERS, ExpertParameter
from rl_megatron_peft.base_model.naming import TARGETS, HFModule
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.adapter_config import from_peft, required_field, to_peft
from rl_megatron_peft.peft.checkpoint_folders import PEFT_CONFIG, new_folder
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, SchemaError
from rl_protocol.support.peft_config import PICKLED, PICKLED_FILE, VALUE_HEAD

WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "adapter_manifest.json"
PREFIX = "base_model.model."
_HEAD = f"{PREFIX}{VALUE_HEAD}."

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _DTYPES.items()}
_EXPERTS = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.mlp\.experts((?:\.base_layer)*)", re.ASCII)
"""PEFT wraps the module of the experts once for each of its parameters, the first innermost."""
_FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "magnitude"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """The factors of one module, of one element type.

    For a parameter of experts `rank` below is experts * rank: rows of A are ordered by expert, then
    by rank, columns of B by rank, then by expert.

    Attributes:
        a: lora_A [rank, in].
        b: lora_B [out, rank].
        magnitude: with DoRA, the norm of each row of the merged weight [out]; otherwise None.
    """

    a: WeightTensor
    b: WeightTensor
    magnitude: WeightTensor | None = None

    def tensors(self) -> dict[str, WeightTensor]:
        """Return the factors that are not None, by attribute name."""
        named = {"a": self.a, "b": self.b, "magnitude": self.magnitude}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter of a model.

    Attributes:
        base_model: name or path of the base model; empty if unknown.
        config: rank, alpha and targets.
        pairs: full Hugging Face name of a module, or of a parameter of experts, such as
            `model.layers.0.mlp.experts.down_proj` -> its factors.
        fingerprint: of the base model's weights, stored in the manifest; empty if unknown.
    """

    base_model: str
    config: LoraConfig
    pairs: Mapping[str, LoraPair]
    fingerprint: str = ""


def verify_adapter(adapter: Adapter, file: str = WEIGHTS_FILE) -> None:
    """Check that the factors match the configuration: targets, layers, shapes and element types.

    Raises:
        AdapterError: they don't; names the file and the module or tensor.
    """
    config = adapter.config
    if not adapter.pairs:
        raise bad_file(file, "pairs", "is empty")
    layers: set[int] = set()
    for module, pair in adapter.pairs.items():
        parameter = ExpertParameter.parse(module)
        try:
            layers.add((parameter or HFModule.parse(module)).layer)
            covered = config.covers(module) if parameter is None else config.covers_experts(parameter)
        except ConfigError as error:
            raise bad_file(file, module, str(error)) from error
        if not covered:
            raise bad_file(
                file,
                module,
                f"has an adapter, but target_modules is {config.target_modules!r}, exclude {config.exclude!r}",
            )
        _verify_pair(file, module, pair, config)
    names_of = _targets_of(layers, adapter.pairs, config)
    for module, names in names_of.items():
        if module not in adapter.pairs and any(map(config.covers, names)):
            raise bad_file(file, module, "is a target and has no adapter, but others of its layer have one")
    present = [name for names in names_of.values() for name in names]
    for name in config.target_modules if isinstance(config.target_modules, tuple) else ():
        if not any(module == name or module.endswith("." + name) for module in present):
            raise bad_file(file, "target_modules", f"names {name!r}, which no layer with adapters has")


def _targets_of(layers: set[int], pairs: Collection[str], config: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return what can have adapters in these layers -> the names by which settings choose it.

    The feed-forward layers have experts if these have adapters. If no module of them has one, they
    may have experts that the settings leave out.
    """
    parameters = [ExpertParameter(layer, name) for layer in sorted(layers) for name in EXPERT_PARAMETERS]
    inside = {logical for parameter in parameters for logical in parameter.logical}
    modules = [HFModule(layer, name) for layer in sorted(layers) for name in TARGETS]
    dense = any(module.name in pairs for module in modules if module.logical in inside)
    left_out = not any(config.covers(target) for parameter in parameters for target in parameter.targets)
    of_experts = {one.name: one.targets for one in parameters}
    experts = not of_experts.keys().isdisjoint(pairs) or (left_out and not dense)
    found = {module.name: (module.name,) for module in modules if not (experts and module.logical in inside)}
    return found | (of_experts if experts else {})


def _verify_pair(file: str, module: str, pair: LoraPair, config: LoraConfig) -> None:
    rank, of_experts = config.rank_of(module), ExpertParameter.parse(module) is not None
    for side, tensor, axis in (("lora_A", pair.a, 0), ("lora_B", pair.b, 1)):
        field = f"{module}.{side}"
        if tensor.dtype not in _CODES:
            raise bad_file(file, field, f"is of type {tensor.dtype}; supported are {', '.join(_CODES)}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise bad_file(file, field, f"has shape {tensor.shape}; expected two non-empty dimensions")
        if tensor.shape[axis] % rank if of_experts else tensor.shape[axis] != rank:
            wanted = f"a multiple of {rank}" if of_experts else rank
            raise bad_file(file, field, f"has shape {tensor.shape}, but r is {rank}: dimension {axis} must be {wanted}")
    if pair.a.shape[0] != pair.b.shape[1]:
        raise bad_file(
            file, module, f"has factors of shapes {pair.a.shape} and {pair.b.shape}, of different numbers of experts"
        )
    if pair.a.dtype != pair.b.dtype:
        raise bad_file(file, module, f"has factors of different types, {pair.a.dtype} and {pair.b.dtype}")
    _verify_magnitude(file, f"{module}.lora_magnitude_vector", pair, config)


def _verify_magnitude(file: str, field: str, pair: LoraPair, config: LoraConfig) -> None:
    magnitude = pair.magnitude
    if (magnitude is not None) != config.use_dora:
        raise bad_file(
            file, field, f"is {'missing' if config.use_dora else 'present'}, but use_dora is {config.use_dora}"
        )
    if magnitude is None:
        return
    if magnitude.dtype not in _CODES:
        raise bad_file(file, field, f"is of type {magnitude.dtype}; supported are {', '.join(_CODES)}")
    if magnitude.shape != pair.b.shape[:1]:
        raise bad_file(file, field, f"has shape {magnitude.shape}, but lora_B has {pair.b.shape[0]} rows")


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write a new adapter folder, which appears complete or not at all.

    Raises:
        AdapterError: the adapter contradicts itself; nothing is written.
        OutputError: `path` exists or can't be written.
    """
    verify_adapter(adapter, "the adapter to be written")
    new_folder(path, lambda folder: write_adapter_files(folder, adapter))


def write_adapter_files(folder: Path, adapter: Adapter) -> list[Path]:
    """Write the files of an adapter into an empty folder and return them.

    Raises:
        AdapterError: the adapter contradicts itself; nothing is written.
        OSError: a file can't be written.
    """
    verify_adapter(adapter, "the adapter to be written")
    sums = {
        WEIGHTS_FILE: _write(folder / WEIGHTS_FILE, _weights_bytes(adapter)),
        PEFT_CONFIG: _write(
            folder / PEFT_CONFIG, _json_bytes(to_peft(adapter.config, adapter.base_model, adapter.pairs))
        ),
    }
    _write(folder / MANIFEST_FILE, _json_bytes({"version": 1, "files": sums, "base_model": adapter.fingerprint}))
    return [folder / name for name in (*sums, MANIFEST_FILE)]


def peft_tensors(adapter: Adapter) -> dict[str, WeightTensor]:
    """Return the tensors by their PEFT names, such as `base_model.model.<module>.lora_A.weight`."""
    suffix = {side: suffix for suffix, side in _FACTORS.items()}
    return {
        f"{PREFIX}{_peft_module(module, adapter.pairs)}{suffix[side]}": tensor
        for module in sorted(adapter.pairs)
        for side, tensor in adapter.pairs[module].tensors().items()
    }


def read_adapter(path: Path, *, value_head: bool = False) -> Adapter:
    """Read and verify an adapter folder. The tensors are views of the bytes read.

    Args:
        path: the folder.
        value_head: it may also hold a value head, which `read_value_head` reads.

    Raises:
        AdapterError: a file is missing, damaged, or contradicts another; names file and field.
    """
    config_bytes = _read(path / PEFT_CONFIG)
    _refuse_pickles(path)
    weights_bytes = _read(path / WEIGHTS_FILE)
    fingerprint = ""
    if (path / MANIFEST_FILE).exists():
        fingerprint = _check_manifest(path, {PEFT_CONFIG: config_bytes, WEIGHTS_FILE: weights_bytes})
    fields = _json_object(path / PEFT_CONFIG, config_bytes)
    config = from_peft(str(path / PEFT_CONFIG), fields, value_head=value_head)
    entries = _entries(str(path / WEIGHTS_FILE), weights_bytes)
    if value_head:
        entries = {name: entry for name, entry in entries.items() if not name.startswith(_HEAD)}
    pairs = _with_parameters(str(path / WEIGHTS_FILE), _pairs_from(str(path / WEIGHTS_FILE), entries), config)
    base_model = str(fields.get("base_model_name_or_path") or "")
    adapter = Adapter(base_model=base_model, config=config, pairs=pairs, fingerprint=fingerprint)
    verify_adapter(adapter, str(path / WEIGHTS_FILE))
    return adapter


def read_value_head(path: Path, hidden: int) -> dict[str, WeightTensor]:
    """Read the head of a model for token or sequence classification from an adapter folder.

    Args:
        path: the folder.
        hidden: hidden size of the base model.

    Returns:
        `weight` [1, hidden] and, if it has one, `bias` [1]; empty: the folder has no head.

    Raises:
        AdapterError: the file is damaged, or a shape differs; names file and field.
    """
    file = str(path / WEIGHTS_FILE)
    entries = _entries(file, _read(path / WEIGHTS_FILE))
    head = {name[len(_HEAD) :]: _tensor(file, name, one) for name, one in entries.items() if name.startswith(_HEAD)}
    wanted = {"weight": (1, hidden), "bias": (1,)}
    for name, tensor in head.items():
        if tensor.shape != wanted.get(name):
            raise bad_file(file, f"{_HEAD}{name}", f"has shape {tensor.shape}; expected {wanted.get(name, 'none')}")
    if head and "weight" not in head:
        raise bad_file(file, f"{_HEAD}weight", "is missing, but the bias is present")
    return head


# -- tensors


def _weights_bytes(adapter: Adapter) -> list[bytes | memoryview]:
    """Return a safetensors file as a list of buffers.

    The header length as 8 bytes little-endian, the JSON header padded with spaces to a multiple of
    8 bytes, then the tensors without gaps.
    """
    tensors = peft_tensors(adapter)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return [len(text).to_bytes(8, "little"), text, *(tensor.data.data for tensor in tensors.values())]


def _entries(file: str, raw: bytes) -> dict[str, dict[str, Any]]:
    """Name of each tensor, ascending -> its dtype, shape and data."""
    try:
        entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(raw)  # pyright: ignore[reportAssignmentType]
    except safetensors.SafetensorError as error:
        raise bad_file(file, "header", f"is not a safetensors header: {error}") from error
    return dict(sorted(entries, key=itemgetter(0)))  # the parser's order varies


def _pairs_from(file: str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, LoraPair]:
    factors: dict[str, dict[str, WeightTensor]] = {}
    for name, entry in entries.items():
        suffix = next((s for s in _FACTORS if name.endswith(s)), None)
        if suffix is None or not name.startswith(PREFIX):
            raise bad_file(
                file,
                name,
                f"is not named like '{PREFIX}<module>.lora_A.weight', '.lora_B.weight' or '.lora_magnitude_vector'",
            )
        module = name[len(PREFIX) : -len(suffix)]
        factors.setdefault(module, {})[_FACTORS[suffix]] = _tensor(file, name, entry)
    for module, sides in factors.items():
        for suffix, side in _FACTORS.items():
            if side not in sides and side != "magnitude":
                raise bad_file(
                    file, f"{PREFIX}{module}{suffix}", "is missing, but the module's other factor is present"
                )
    return {module: LoraPair(**sides) for module, sides in sorted(factors.items())}


def _peft_module(name: str, pairs: Collection[str]) -> str:
    """Return the module of PEFT that has the factors of a module or of a parameter of experts."""
    parameter = ExpertParameter.parse(name)
    if parameter is None:
        return name
    wrapped = [one for one in EXPERT_PARAMETERS if ExpertParameter(parameter.layer, one).name in pairs]
    return parameter.module + ".base_layer" * (len(wrapped) - 1 - wrapped.index(parameter.parameter))


def _with_parameters(file: str, pairs: Mapping[str, LoraPair], config: LoraConfig) -> dict[str, LoraPair]:
    """Replace PEFT's modules of experts by the parameters that they wrap."""
    found: dict[str, LoraPair] = {}
    for name, pair in pairs.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[name] = pair
            continue
        parameters = [ExpertParameter(int(match[1]), one) for one in EXPERT_PARAMETERS]
        try:
            wrapped = [parameter for parameter in parameters if config.covers_experts(parameter)]
        except ConfigError as error:
            raise bad_file(file, name, str(error)) from error
        depth = match[2].count(".")
        if depth >= len(wrapped):
            covered = ", ".join(parameter.name for parameter in wrapped) or "none of its experts"
            raise bad_file(file, name, f"has an adapter, but the targets in its layer are {covered}")
        found[wrapped[len(wrapped) - 1 - depth].name] = pair
    return found


def _tensor(file: str, name: str, entry: Mapping[str, Any]) -> WeightTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise bad_file(file, name, f"is of type {entry['dtype']}; supported are {', '.join(_DTYPES)}")
    try:
        return WeightTensor(name, dtype, tuple(entry["shape"]), np.frombuffer(entry["data"], dtype=np.uint8))
    except SchemaError as error:
        raise bad_file(file, name, str(error)) from error


# -- files


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise bad_file(str(file), "file", f"can't be read: {error.strerror or error}") from error


def _refuse_pickles(path: Path) -> None:
    if (path / PICKLED_FILE).exists() and not (path / WEIGHTS_FILE).exists():
        raise bad_file(str(path / PICKLED_FILE), "file", PICKLED)


def _json_bytes(value: object) -> list[bytes | memoryview]:
    return [(json.dumps(value, indent=2) + "\n").encode()]


def _json_object(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_file(str(file), "file", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_file(str(file), "file", f"must hold a JSON object; got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _write(file: Path, parts: list[bytes | memoryview]) -> dict[str, object]:
    """Write a file to disk and return its entry in the manifest."""
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
    """Check the files against the manifest and return the fingerprint of the base model."""
    file = path / MANIFEST_FILE
    manifest = _json_object(file, _read(file))
    if manifest.get("version") != 1:
        raise bad_file(str(file), "version", f"must be 1; got {manifest.get('version')!r}")
    files = required_field(str(file), manifest, "files", dict)
    for name, raw in contents.items():
        want = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        if files.get(name) != want:
            raise bad_file(
                str(path / name), "file", f"does not match {MANIFEST_FILE}: expected {files.get(name)}, got {want}"
            )
    return str(manifest.get("base_model", ""))
