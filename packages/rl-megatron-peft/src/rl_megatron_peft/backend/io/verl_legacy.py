"""Read verl's old adapter checkpoints: one pickle per model-parallel rank.

    adapter_checkpoint/mp_rank_<tt>_adapter.pt        {"adapter_state_dict": {name: tensor}}, one
                                                      per tensor-parallel rank
    adapter_checkpoint/mp_rank_<tt>_<ppp>_adapter.pt  the same with pipeline stages; layers are
                                                      numbered from 0 in each

Rank, alpha and base model are not stored. Names are those of Megatron-Bridge's fused LoRA,
`decoder.layers.<i>.mlp.linear_fc1.adapter.linear_in.weight`. Tensor parallelism splits linear_in
in the rank dimension, or for linear_proj and linear_fc2 by columns; it splits linear_out by the
rows of the fused layer. The pickles are read with torch's `weights_only`, which executes no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError  # raised by torch.load; nothing is unpickled here
from typing import Any

import torch

from rl_megatron_peft.backend.model.fused_rows import unfuse
from rl_megatron_peft.base_model.fingerprint import fingerprint
from rl_megatron_peft.base_model.layout import ROW_PARALLEL, Layout
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import FUSED, MegatronModule
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.adapter_folder import Adapter, LoraPair, verify_adapter
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_megatron_peft.peft.verl_files import FACTOR, adapter_folder, files_by_rank
from rl_protocol.torch import to_weight

Shards = dict[tuple[int, str, str], list[torch.Tensor]]
"""(layer in the whole model, fused module, `in` or `out`) -> one shard per tensor-parallel rank."""


def read_legacy(path: Path, base: Path, *, alpha: float) -> Adapter:
    """Read the adapter in an `adapter_checkpoint` folder, or in a folder that contains one.

    Args:
        path: the folder.
        base: Hugging Face folder of the base model, which the files do not name.
        alpha: the LoRA alpha of training, which the files do not store.

    Raises:
        AdapterError: files are missing or damaged, or do not hold fused LoRA adapters of this
            model; names file and field.
        ConfigError: the base model is not supported.
    """
    folder = adapter_folder(path)
    shape, (files, layout) = ModelShape.read(base), files_by_rank(folder)
    layout.check(shape)
    shards: Shards = {}
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            file = files[tensor, pipeline]
            for (layer, fused, side), part in _read(file).items():
                if layer >= shape.layers // layout.pipeline:
                    raise bad_file(file, f"decoder.layers.{layer}", f"exceeds the {shape.layers} layers of {base}")
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


def _read(file: Path) -> dict[tuple[int, str, str], torch.Tensor]:
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # whose text advises to load the file without `weights_only`
        raise bad_file(file, "file", "is damaged, or holds other objects than tensors, which are not read") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise bad_file(file, "file", f"can't be read as tensors: {str(error).splitlines()[0]}") from error
    state: Any = loaded.get("adapter_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not state:
        raise bad_file(file, "adapter_state_dict", "is missing or empty")
    found: dict[tuple[int, str, str], torch.Tensor] = {}
    for name, tensor in state.items():
        match = FACTOR.fullmatch(str(name))
        if match is None or match[2] not in FUSED or not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
            raise bad_file(file, str(name), "is not a factor of a LoRA adapter on a fused module of a dense model")
        found[int(match[1]), match[2], match[3]] = tensor
    return found


def _pairs(folder: Path, shards: Shards, shape: ModelShape, layout: Layout) -> dict[str, LoraPair]:
    pairs: dict[str, LoraPair] = {}
    layers = {layer for layer, *_ in shards}
    if missing := sorted(set(range(shape.layers)) - layers):
        raise bad_file(
            folder,
            f"decoder.layers.{missing[0]}",
            "is in none of its files; verl kept only one chunk of a virtual pipeline",
        )
    for layer, fused in sorted({key[:2] for key in shards}):
        module = MegatronModule(layer, fused)
        for side in ("in", "out"):
            parts = shards.get((layer, fused, side), [])
            if len(parts) != layout.tensor or len({part.shape for part in parts}) != 1:
                raise bad_file(
                    folder,
                    f"{module.name}.adapter.linear_{side}",
                    "is not in the files of all tensor-parallel ranks with the same shape",
                )
        a = torch.cat(shards[layer, fused, "in"], dim=1 if fused in ROW_PARALLEL else 0)
        rows = sum(shape.linear(part.logical)[0] for part in module.parts)
        if sum(shard.shape[0] for shard in shards[layer, fused, "out"]) != rows:
            raise bad_file(
                folder, f"{module.name}.adapter.linear_out", f"does not have the {rows} rows that the base model needs"
            )
        rows_of = _rows(module, shards[layer, fused, "out"], shape, layout)
        for part, b in zip(module.parts, rows_of, strict=True):
            out, inner = shape.linear(part.logical)
            for name, tensor, size in (("lora_A", a, (a.shape[0], inner)), ("lora_B", b, (out, a.shape[0]))):
                if tuple(tensor.shape) != size:
                    raise bad_file(
                        folder,
                        f"{part.name}.{name}",
                        f"has shape {tuple(tensor.shape)}; the base model needs {size}",
                    )
            pairs[part.name] = LoraPair(a=to_weight(part.name, a), b=to_weight(part.name, b.contiguous()))
    return pairs


def _rows(
    module: MegatronModule, shards: Sequence[torch.Tensor], shape: ModelShape, layout: Layout
) -> Sequence[torch.Tensor]:
    """Return B of each logical module, in Hugging Face order."""
    if len(module.parts) == 1:
        return [torch.cat(list(shards))]
    split = [unfuse(shard, module.fused, shape, layout.tensor) for shard in shards]
    return [torch.cat(parts) for parts in zip(*split, strict=True)]
