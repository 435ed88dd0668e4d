"""Checkpoints to resume training from, in the format of Megatron's dist_checkpointing.

    <folder>/dist_ckpt/     trained tensors, optimizer and random state, sharded as the ranks held
                            them; any layout can read them
    <folder>/manifest.json  steps, what is trained, fingerprint of the base model, size and sha256
                            of every file; written last

A folder appears complete or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch.distributed.checkpoint.api import CheckpointException

from rl_megatron_peft.backend.cpu_shims import runnable
from rl_megatron_peft.backend.learner import MegatronLearner
from rl_megatron_peft.backend.parallel import on_first_rank
from rl_megatron_peft.backend.train.optimizer import MOMENTS
from rl_megatron_peft.errors import bad_file
from rl_megatron_peft.peft.checkpoint_folders import FORMAT, MANIFEST, fsync_tree, refuse_unless_resumable
from rl_protocol import OutputError
from rl_protocol.support.disk_writes import fsync, write_errors
from rl_protocol.support.temporary_folders import temporary_folder

TENSORS = "dist_ckpt"
_RANDOM = "random_state"


def save_checkpoint(learner: MegatronLearner[Any], path: Path) -> None:
    """Write a checkpoint into a new folder; a collective over all ranks, which share a file system.

    Raises:
        OutputError: on every rank, if `path` exists or can't be written; nothing is left there.
    """

    def prepare() -> str:
        if path.exists():
            raise OutputError(
                f"{path} exists; a checkpoint needs a new folder. Remove it or choose another.", path=str(path)
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = unfinished.enter_context(temporary_folder(".unfinished-", path.parent)) / path.name
        (folder / TENSORS).mkdir(parents=True)
        return str(folder)

    def finish() -> None:
        if problem:
            raise OSError(problem)
        _publish(learner, folder, path)

    with ExitStack() as unfinished:
        folder = Path(_writing(learner, path, prepare))
        with runnable():
            problem = _write_tensors(learner, folder / TENSORS, path)
        _writing(learner, path, finish)


def _write_tensors(learner: MegatronLearner[Any], folder: Path, path: Path) -> str:
    """Write what `dist_checkpointing.save` writes; returns what failed on any rank, or "".

    There a failure of the first rank, which alone writes common.pt, leaves the others waiting.
    """
    strategy = get_default_save_sharded_strategy()
    tensors, common = save_preprocess(_sharded(learner, _state(learner)))

    def write_common() -> None:
        try:
            get_default_save_common_strategy().save_common(common, folder)
        except RuntimeError as error:  # what torch raises if it can't write a file
            raise OSError(str(error)) from error
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))

    _writing(learner, path, write_common)
    try:
        strategy.save(cast(dict[str, Any], tensors), folder)
    except CheckpointException as error:  # every rank raises it, and the first one has the reasons
        return ", ".join(sorted({str(why) for why, _ in error.failures.values()})) or str(error)
    return ""


def _publish(learner: MegatronLearner[Any], scratch: Path, path: Path) -> None:
    """Write the manifest and give the folder its name."""
    manifest = {
        "format": FORMAT,
        **learner.manifest_fields(),
        **({} if learner.lora is None else {"dropout": learner.lora.dropout}),  # a later run may have another
        "steps": learner.optimizer.steps,
        "updates": learner.updates,
    }
    files = {str(file.relative_to(scratch)): _checksum(file) for file in sorted((scratch / TENSORS).iterdir())}
    with (scratch / MANIFEST).open("x") as out:
        json.dump({**manifest, "files": files}, out, indent=2, sort_keys=True)
    fsync_tree(scratch)
    scratch.rename(path)
    fsync(path.parent)


def load_checkpoint(learner: MegatronLearner[Any], path: Path) -> None:
    """Load a checkpoint, which may have been written under another layout; a collective.

    Raises:
        AdapterError: the folder is of another kind or damaged, or the base model or LoRA settings
            differ; names file and field. Nothing is changed.
    """
    on_first_rank(lambda: _verify(learner, path), path, learner.ranks.device)
    manifest = _read_manifest(path / MANIFEST)
    state = {key: torch.empty_like(tensor) for key, tensor in _state(learner).items()}
    with runnable():
        loaded = cast(dict[str, torch.Tensor], dist_checkpointing.load(_sharded(learner, state), str(path / TENSORS)))
    learner.optimizer.load_state(loaded, int(manifest["steps"]))
    torch.set_rng_state(loaded[_RANDOM].cpu())
    learner.updates = int(manifest["updates"])


def _state(learner: MegatronLearner[Any]) -> dict[str, torch.Tensor]:
    """Return everything this rank saves."""
    state: dict[str, torch.Tensor] = {_RANDOM: torch.get_rng_state()}
    for _, parts in learner.optimizer.state():
        state |= parts
    return state


def _sharded(learner: MegatronLearner[Any], state: Mapping[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """Say which shard of which global tensor each tensor is, and which of its copies."""
    ranks, shards = learner.ranks, learner.ranks.layout.tensor
    holders = {key: one for one in learner.optimizer.trained for key in one.keys}
    sharded: dict[str, ShardedTensor] = {}
    for key, tensor in state.items():
        tensor_key = next((key.removesuffix(f".{moment}") for moment in MOMENTS if key.endswith(f".{moment}")), key)
        holder = holders.get(tensor_key)
        split = None if holder is None else holder.split
        data = ranks.data if key == _RANDOM else learner.optimizer.replica_id(holder)
        offsets = () if split is None else ((split, ranks.tensor, shards),)
        replica_id = (ranks.pipeline if key == _RANDOM else 0, ranks.tensor if split is None else 0, data)
        sharded[key] = ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica_id)
    return sharded


def _verify(learner: MegatronLearner[Any], path: Path) -> None:
    refuse_unless_resumable(path)
    file = path / MANIFEST
    manifest = _read_manifest(file)
    for field, want in learner.manifest_fields().items():
        if manifest.get(field) != want:
            raise bad_file(file, field, f"is {manifest.get(field)!r}, the model's is {want!r}")
    for name, want in manifest["files"].items():
        part = path / name
        try:
            got = _checksum(part) if part.is_file() else None
        except OSError as error:
            raise bad_file(part, "file", f"can't be read: {error.strerror or error}") from error
        if got != want:
            raise bad_file(part, "file", f"does not match {MANIFEST}: expected {want}, got {got}")


def _read_manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise bad_file(file, "file", f"can't be read: {error}") from error
    for field, kind in (("files", dict), ("steps", int), ("updates", int)):
        if not isinstance(manifest, dict) or not isinstance(manifest.get(field), kind):
            raise bad_file(file, field, f"is missing or not of type {kind.__name__}")
    return manifest


def _checksum(file: Path) -> dict[str, object]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _writing(learner: MegatronLearner[Any], path: Path, work: Callable[[], str | None]) -> str:
    """Call `work`, which writes files of the checkpoint `path`, on the first rank alone."""

    def write() -> str | None:
        with write_errors(path, "The checkpoint", "Free some space there, or write it to another folder."):
            return work()

    return on_first_rank(write, path, learner.ranks.device)
