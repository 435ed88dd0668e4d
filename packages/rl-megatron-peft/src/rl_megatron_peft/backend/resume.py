"""Checkpoints to go on from: Megatron's dist_checkpointing, of what is trained, optimizer and random state alone.

    <folder>/dist_ckpt/       tensors in Megatron's own format, cut as the ranks held them; any layout can read them
    <folder>/manifest.json    steps, what is trained, fingerprint of the base, size and sha256 of every file; written last

A folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from rl_megatron_peft.backend.compat import runnable
from rl_megatron_peft.backend.learner import MegatronLearner
from rl_megatron_peft.backend.optimise import MOMENTS
from rl_megatron_peft.backend.parallel import gather_json
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.folders import FORMAT, MANIFEST, refuse_unless_resumable
from rl_protocol import OutputError
from rl_protocol.durable import fsync

TENSORS = "dist_ckpt"
_RANDOM = "random_state"
_CHUNK = 1 << 22


def save_checkpoint(learner: MegatronLearner[Any], path: Path) -> None:
    """Write a new folder, whole or not at all; a collective over all ranks, all of which reach the same file system.

    Raises:
        OutputError: `path` exists or can't be written; on every rank.
    """
    scratch = path.with_name(f".{path.name}.partial")

    def prepare() -> None:
        if path.exists():
            raise OutputError(
                f"{path} exists; a checkpoint is written to a new folder. Remove it or choose another.", path=str(path)
            )
        if scratch.exists():
            shutil.rmtree(scratch)  # of a run that was killed while it wrote
        (scratch / TENSORS).mkdir(parents=True)

    def finish() -> None:
        manifest = {"format": FORMAT, **learner.facts(), "steps": learner.optimiser.steps, "updates": learner.updates}
        files = {str(file.relative_to(scratch)): _sum(file) for file in sorted((scratch / TENSORS).iterdir())}
        with (scratch / MANIFEST).open("x") as out:
            json.dump({**manifest, "files": files}, out, indent=2, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        scratch.rename(path)
        fsync(path.parent)

    _on_first_rank(learner, path, prepare)
    with runnable():
        dist_checkpointing.save(_sharded(learner, _state(learner)), str(scratch / TENSORS))
    _on_first_rank(learner, path, finish)


def load_checkpoint(learner: MegatronLearner[Any], path: Path) -> None:
    """Go on from a checkpoint, which may have been written under another layout; a collective over all ranks.

    Raises:
        AdapterError: another layout of files, damaged, of another base model or with other LoRA settings; names file and field. Nothing
            was changed.
    """
    _on_first_rank(learner, path, lambda: _verify(learner, path))
    found = _manifest(path / MANIFEST)
    state = {key: torch.empty_like(tensor) for key, tensor in _state(learner).items()}
    with runnable():
        loaded = cast(dict[str, torch.Tensor], dist_checkpointing.load(_sharded(learner, state), str(path / TENSORS)))
    learner.optimiser.take_state(loaded, int(found["steps"]))
    torch.set_rng_state(loaded[_RANDOM].cpu())
    learner.updates = int(found["updates"])


def _state(learner: MegatronLearner[Any]) -> dict[str, torch.Tensor]:
    """Everything this rank goes on from."""
    state: dict[str, torch.Tensor] = {_RANDOM: torch.get_rng_state()}
    for _, parts in learner.optimiser.state():
        state |= parts
    return state


def _sharded(learner: MegatronLearner[Any], state: Mapping[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """Which part of which whole each tensor is, and which of its copies."""
    ranks, of = learner.ranks, learner.ranks.layout.tensor
    splits = {key: one.split for one in learner.optimiser.trained for key in one.keys}
    sharded: dict[str, ShardedTensor] = {}
    for key, tensor in state.items():
        tensor_key = next((key.removesuffix(f".{moment}") for moment in MOMENTS if key.endswith(f".{moment}")), key)
        split = splits.get(tensor_key)
        data = ranks.data if key == _RANDOM else learner.optimiser.copy
        cut = () if split is None else ((split, ranks.tensor, of),)
        copy = (ranks.pipeline if key == _RANDOM else 0, ranks.tensor if split is None else 0, data)
        sharded[key] = ShardedTensor.from_rank_offsets(key, tensor, *cut, replica_id=copy)
    return sharded


def _verify(learner: MegatronLearner[Any], path: Path) -> None:
    refuse_unless_resumable(path)
    file = path / MANIFEST
    manifest = _manifest(file)
    for field, want in learner.facts().items():
        if manifest.get(field) != want:
            raise AdapterError(
                f"{file}: {field} is {manifest.get(field)!r}, the model's is {want!r}.", file=str(file), field=field
            )
    for name, want in manifest["files"].items():
        part = path / name
        got = _sum(part) if part.is_file() else None
        if got != want:
            raise AdapterError(
                f"{part}: file is not what {MANIFEST} says: expected {want}, got {got}.", file=str(part), field="file"
            )


def _manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file}: file can't be read: {error}.", file=str(file), field="file") from error
    for field, kind in (("files", dict), ("steps", int), ("updates", int)):
        if not isinstance(manifest, dict) or not isinstance(manifest.get(field), kind):
            raise AdapterError(f"{file}: {field} is missing or no {kind.__name__}.", file=str(file), field=field)
    return manifest


def _sum(file: Path) -> dict[str, object]:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _on_first_rank(learner: MegatronLearner[Any], path: Path, work: Callable[[], None]) -> None:
    """Done by the first rank while the others wait; what went wrong there goes wrong on all of them."""
    problem: dict[str, str] = {}
    if dist.get_rank() == 0:
        try:
            work()
        except AdapterError as error:
            problem = {"message": str(error), "file": error.file, "field": error.field}
        except OSError as error:
            problem = {"message": f"The checkpoint can't be written to {path}: {error}"}
    problem = gather_json(problem, learner.ranks.device)[0]
    if "field" in problem:
        raise AdapterError(problem["message"], file=problem["file"], field=problem["field"])
    if problem:
        raise OutputError(problem["message"], path=str(path))
