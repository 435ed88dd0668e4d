"""A model's state as a trainer keeps it beside what it knows itself: copied at once, written from a thread, read back under any layout.

    stage-<p>-shard-<t>.safetensors   what one rank trains and its AdamW moments, by `<module>.lora_A` and `<module>.lora_A.exp_avg`, for instance
    ...-replica-<d>.safetensors       the same, of what one replica keeps the optimizer's state of, where replicas share it
    adapter_state.json                steps, updates, what is trained, fingerprint of the base

Each tensor is written once: by the first replica, or the one that keeps it, and of what all tensor-parallel ranks hold alike by the first of
them. Dropout depends on the number of the step, so there is no random state to keep. (`rl_megatron_peft.backend.resume` writes Megatron's own
format.)
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

from rl_megatron_peft.backend.optimise import Optimiser
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.errors import AdapterError
from rl_protocol import OutputError

STATE = "adapter_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """How far training is."""

    steps: int
    updates: int


def take_snapshot(
    optimiser: Optimiser, ranks: Ranks, facts: Mapping[str, object], updates: int
) -> Callable[[Path], Sequence[Path]]:
    """Copy this rank's part; what is returned writes it into a folder, from any thread, and returns the files.

    Args:
        optimiser: has the state.
        ranks: where this process stands.
        facts: what a model that goes on from it must have in common with this one.
        updates: made so far.
    """
    tensors: dict[str, torch.Tensor] = {}
    for one, parts in optimiser.state() if not optimiser.copy else ():
        if one.split is not None or not ranks.tensor:
            tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.items()}
    state = {**facts, "steps": optimiser.steps, "updates": updates}
    leads = not (ranks.data or ranks.tensor or ranks.pipeline)

    def write(folder: Path) -> Sequence[Path]:
        files: list[Path] = []
        if tensors:
            replica = f"-replica-{ranks.data:05d}" if optimiser.distributed else ""
            files.append(folder / f"stage-{ranks.pipeline:05d}-shard-{ranks.tensor:05d}{replica}.safetensors")
            try:
                save_file(tensors, files[-1])
            except SafetensorError as error:
                raise OutputError(
                    f"The state can't be written to {files[-1]}: {error}.", path=str(files[-1])
                ) from error
        if leads:
            files.append(folder / STATE)
            files[-1].write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        return files

    return write


def restore_snapshot(folder: Path, optimiser: Optimiser, ranks: Ranks, facts: Mapping[str, object]) -> Counters:
    """Take over this rank's part of what all ranks of a snapshot wrote, whatever their layout was.

    Raises:
        AdapterError: it is of another model, or can't be read; names file and field. Nothing was changed.
    """
    state = _read_state(folder / STATE, facts)
    new: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        holders = _open_all(folder, stack)
        for one, shapes, kept in optimiser.expected():
            for name, own in shapes.items():
                shards = [file.get_tensor(name) for file in holders.get(name, ())]
                if not shards:
                    raise _bad(folder, name, "is in none of its safetensors files")
                whole = shards[0] if one.split is None else torch.cat(shards, dim=one.split)
                part = whole if one.split is None else whole.chunk(ranks.layout.tensor, dim=one.split)[ranks.tensor]
                if part.shape != own:
                    raise _bad(folder, name, f"has shape {tuple(whole.shape)}, which does not fit")
                if kept:
                    new[name] = part
    optimiser.take_state(new, state.steps)
    return state


def _open_all(folder: Path, stack: ExitStack) -> dict[str, list[Any]]:
    """Name of each tensor -> the open files that have a part of it, in the order of the parts."""
    holders: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("stage-*.safetensors")):
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise _bad(path, "file", f"can't be read as safetensors: {error}") from error
        for name in opened.keys():  # noqa: SIM118 - an open file, not a mapping
            holders.setdefault(name, []).append(opened)
    return holders


def _read_state(file: Path, facts: Mapping[str, object]) -> Counters:
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _bad(
            file, "file", f"can't be read: {error}. A state of model_engine=torch or fsdp is of another kind"
        ) from error
    for field, want in facts.items():
        if not isinstance(state, dict) or state.get(field) != want:
            raise _bad(file, field, f"is not the model's {want!r}")
    for field in ("steps", "updates"):
        if not isinstance(state.get(field), int):
            raise _bad(file, field, "is missing or no int")
    return Counters(steps=state["steps"], updates=state["updates"])


def _bad(file: Path, field: str, why: str) -> AdapterError:
    return AdapterError(f"{file}: {field} {why}.", file=str(file), field=field)
