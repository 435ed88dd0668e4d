"""verl's old adapter checkpoints: one pickle per tensor- and pipeline-parallel rank, without rank, alpha or base model.

    adapter_checkpoint/mp_rank_<tt>_adapter.pt          {"adapter_state_dict": {name: tensor}}, one per tensor-parallel rank
    adapter_checkpoint/mp_rank_<tt>_<ppp>_adapter.pt    the same with pipeline stages; layers are numbered from 0 in each

Names are those of Megatron-Bridge's fused LoRA, `decoder.layers.<i>.mlp.linear_fc1.adapter.linear_in.weight`. Tensor parallelism cuts
linear_in in its rank dimension, except for linear_proj and linear_fc2, whose columns it cuts; linear_out is cut in its rows, which are
those of the fused layer. The pickles are read with torch's `weights_only`, which runs nothing in them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError  # what torch raises for what it refuses to run; nothing is unpickled here
from typing import Any

import torch

from rl_megatron_peft.adapter import Adapter, LoraPair, verify_adapter
from rl_megatron_peft.backend.model import unfuse
from rl_megatron_peft.base_model import fingerprint
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.folders import LEGACY
from rl_megatron_peft.layout import ROW_PARALLEL, Layout
from rl_megatron_peft.naming import FUSED, MegatronModule
from rl_protocol.torch import to_weight

_FILE = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?_adapter\.pt")
_NAME = re.compile(
    r"(?:module\.)*decoder\.layers\.(\d+)\.(?:self_attention|mlp)\.(linear_\w+)\.adapter\.linear_(in|out)\.weight"
)

Shards = dict[tuple[int, str, str], list[torch.Tensor]]
"""(layer of the whole model, fused module, in or out) -> its parts, one per tensor-parallel rank."""


def read_legacy(path: Path, base: Path, *, alpha: float) -> Adapter:
    """The adapter of an `adapter_checkpoint` folder, or of a folder that holds one.

    Args:
        path: the folder.
        base: Hugging Face folder of the model it was trained on, which the files do not name.
        alpha: numerator of the scale it was trained with, which the files do not hold.

    Raises:
        AdapterError: files are missing or damaged, or hold something else than fused LoRA of this model; names file and field.
        ConfigError: the base is no model that is known.
    """
    folder = path / LEGACY if (path / LEGACY).is_dir() else path
    shape, (files, layout) = ModelShape.read(base), _grid(folder)
    layout.check(shape)
    shards: Shards = {}
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            file = files[tensor, pipeline]
            for (layer, fused, side), part in _read(file).items():
                if layer >= shape.layers // layout.pipeline:
                    raise _bad(
                        file, f"decoder.layers.{layer}", f"is more than the {shape.layers} layers of {base} allow"
                    )
                whole = layer + pipeline * (shape.layers // layout.pipeline)
                shards.setdefault((whole, fused, side), []).append(part)
    pairs = _pairs(folder, shards, shape, layout)
    rank = next(iter(pairs.values())).a.shape[0]
    targets = tuple(name for parts in FUSED.values() for name in parts if any(m.endswith(f".{name}") for m in pairs))
    adapter = Adapter(
        base_model=str(base),
        config=LoraConfig(rank=rank, alpha=alpha, target_modules=targets),
        pairs=pairs,
        fingerprint=fingerprint(base),
    )
    verify_adapter(adapter, str(folder))
    return adapter


def _grid(folder: Path) -> tuple[dict[tuple[int, int], Path], Layout]:
    """(tensor, pipeline) -> the file of that rank, none missing."""
    files: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.glob("*.pt")):
        match = _FILE.fullmatch(file.name)
        if match is None or match[3] is not None:
            raise _bad(file, "layout", "is no file of a tensor- and pipeline-parallel rank; experts are not read")
        files[int(match[1]), int(match[2] or 0)] = file
    if not files:
        raise _bad(folder, "layout", "holds no mp_rank_*_adapter.pt")
    layout = Layout(tensor=max(t for t, _ in files) + 1, pipeline=max(p for _, p in files) + 1)
    for tensor in range(layout.tensor):
        for pipeline in range(layout.pipeline):
            if (tensor, pipeline) not in files:
                raise _bad(folder, "layout", f"lacks the file of tensor rank {tensor}, pipeline stage {pipeline}")
    return files, layout


def _read(file: Path) -> dict[tuple[int, str, str], torch.Tensor]:
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise _bad(file, "file", f"can't be read as tensors: {str(error).splitlines()[0]}") from error
    state: Any = loaded.get("adapter_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not state:
        raise _bad(file, "adapter_state_dict", "is missing or empty")
    found: dict[tuple[int, str, str], torch.Tensor] = {}
    for name, tensor in state.items():
        match = _NAME.fullmatch(str(name))
        if match is None or match[2] not in FUSED or not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
            raise _bad(file, str(name), "is no factor of a LoRA adapter on a fused module of a dense model")
        found[int(match[1]), match[2], match[3]] = tensor
    return found


def _pairs(folder: Path, shards: Shards, shape: ModelShape, layout: Layout) -> dict[str, LoraPair]:
    pairs: dict[str, LoraPair] = {}
    layers = {layer for layer, *_ in shards}
    if missing := sorted(set(range(shape.layers)) - layers):
        raise _bad(
            folder, f"decoder.layers.{missing[0]}", "is in none of its files; verl kept one chunk of a virtual pipeline"
        )
    for layer, fused in sorted({key[:2] for key in shards}):
        module = MegatronModule(layer, fused)
        for side in ("in", "out"):
            parts = shards.get((layer, fused, side), [])
            if len(parts) != layout.tensor or len({part.shape for part in parts}) != 1:
                raise _bad(
                    folder,
                    f"{module.name}.adapter.linear_{side}",
                    "is not in the files of all tensor-parallel ranks with one shape",
                )
        a = torch.cat(shards[layer, fused, "in"], dim=1 if fused in ROW_PARALLEL else 0)
        rows = sum(shape.linear(part.logical)[0] for part in module.parts)
        if sum(shard.shape[0] for shard in shards[layer, fused, "out"]) != rows:
            raise _bad(
                folder, f"{module.name}.adapter.linear_out", f"has not the {rows} rows that the base model makes it"
            )
        rows_of = _rows(module, shards[layer, fused, "out"], shape, layout)
        for part, b in zip(module.parts, rows_of, strict=True):
            out, inner = shape.linear(part.logical)
            for name, tensor, size in (("lora_A", a, (a.shape[0], inner)), ("lora_B", b, (out, a.shape[0]))):
                if tuple(tensor.shape) != size:
                    raise _bad(
                        folder,
                        f"{part.name}.{name}",
                        f"has shape {tuple(tensor.shape)}; the base model makes it {size}",
                    )
            pairs[part.name] = LoraPair(a=to_weight(part.name, a), b=to_weight(part.name, b.contiguous()))
    return pairs


def _rows(
    module: MegatronModule, shards: Sequence[torch.Tensor], shape: ModelShape, layout: Layout
) -> Sequence[torch.Tensor]:
    """B of each logical module, in the order of the Hugging Face weights."""
    if len(module.parts) == 1:
        return [torch.cat(list(shards))]
    split = [unfuse(shard, module.fused, shape, layout.tensor) for shard in shards]
    return [torch.cat(parts) for parts in zip(*split, strict=True)]


def _bad(file: Path, field: str, why: str) -> AdapterError:
    return AdapterError(f"{file}: {field} {why}.", file=str(file), field=field)
