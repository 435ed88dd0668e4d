"""Snapshots: training state for a trainer's own checkpoint, which any layout can read.

    stage-<p>-shard-<t>.safetensors  trained tensors and AdamW moments of one rank, with names such
                                     as `<module>.lora_A` and `<module>.lora_A.exp_avg`
    ...-replica-<d>.safetensors      the same per replica, if replicas share the optimizer state or
                                     hold different experts
    adapter_state.json               steps, updates, what is trained, fingerprint of the base model

The state is copied at once and can be written from a thread. Each tensor is written once, by the
first rank that holds it. There is no random state: dropout depends on the number of the step.
`rl_megatron_peft.backend.resume` writes Megatron's own format instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.backend.train.optimizer import Optimizer
from rl_megatron_peft.errors import bad_file
from rl_protocol import OutputError

STATE = "adapter_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Optimizer steps and updates made so far."""

    steps: int
    updates: int


def take_snapshot(
    optimizer: Optimizer, ranks: Ranks, manifest_fields: Mapping[str, object], updates: int
) -> Callable[[Path], Sequence[Path]]:
    """Copy this rank's part of the state.

    Args:
        optimizer: holds the state.
        ranks: place of this process.
        manifest_fields: fields that must be equal in a model that restores the snapshot.
        updates: number of updates made.

    Returns:
        A function that writes the copy into a folder, from any thread, and returns the files.
    """
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in own_tensors(optimizer, ranks).items()}
    state = {**manifest_fields, "steps": optimizer.steps, "updates": updates}
    first_rank = ranks.data == ranks.tensor == ranks.pipeline == 0

    def write(folder: Path) -> Sequence[Path]:
        files: list[Path] = []
        if tensors:
            replica = f"-replica-{ranks.data:05d}" if optimizer.distributed or ranks.layout.expert > 1 else ""
            files.append(folder / f"stage-{ranks.pipeline:05d}-shard-{ranks.tensor:05d}{replica}.safetensors")
            try:
                save_file(tensors, files[-1])
            except SafetensorError as error:
                raise OutputError(
                    f"The state can't be written to {files[-1]}: {error}.", path=str(files[-1])
                ) from error
        if first_rank:
            files.append(folder / STATE)
            files[-1].write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        return files

    return write


def own_tensors(optimizer: Optimizer, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The trained tensors and moments that this rank writes."""
    tensors: dict[str, torch.Tensor] = {}
    for one, parts in optimizer.state():
        if optimizer.replica_id(one) == 0 and (one.split is not None or not ranks.tensor):
            tensors |= {name: tensor.detach() for name, tensor in parts.items()}
    return tensors


def restore_snapshot(
    folder: Path, optimizer: Optimizer, ranks: Ranks, manifest_fields: Mapping[str, object]
) -> Counters:
    """Restore this rank's part of a snapshot, which may have been taken under another layout.

    Raises:
        AdapterError: it belongs to another model or can't be read; names file and field. Nothing is
            changed.
    """
    state = _read_state(folder / STATE, manifest_fields)
    new: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        files_of = _open_all(folder, stack)
        for one, shapes, owned in optimizer.state_shapes():
            for name, own in shapes.items():
                shards = [file.get_tensor(name) for file in files_of.get(name, ())]
                if not shards:
                    raise bad_file(folder, name, "is in none of its safetensors files")
                whole = shards[0] if one.split is None else torch.cat(shards, dim=one.split)
                part = whole if one.split is None else whole.chunk(ranks.layout.tensor, dim=one.split)[ranks.tensor]
                if part.shape != own:
                    raise bad_file(folder, name, f"has shape {tuple(whole.shape)}, which does not fit")
                if owned:
                    new[name] = part
    optimizer.load_state(new, state.steps)
    return state


def _open_all(folder: Path, stack: ExitStack) -> dict[str, list[Any]]:
    """Return the open files that hold a part of each tensor, in the order of the parts."""
    files_of: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("stage-*.safetensors")):
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise bad_file(path, "file", f"can't be read as safetensors: {error}") from error
        for name in opened.keys():  # noqa: SIM118 - an open file, not a mapping
            files_of.setdefault(name, []).append(opened)
    return files_of


def _read_state(file: Path, manifest_fields: Mapping[str, object]) -> Counters:
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise bad_file(
            file, "file", f"can't be read: {error}. The state of another training engine has another format"
        ) from error
    for field, want in manifest_fields.items():
        if not isinstance(state, dict) or state.get(field) != want:
            raise bad_file(file, field, f"is not the model's {want!r}")
    for field in ("steps", "updates"):
        if not isinstance(state.get(field), int):
            raise bad_file(file, field, "is missing or not an int")
    return Counters(steps=state["steps"], updates=state["updates"])
