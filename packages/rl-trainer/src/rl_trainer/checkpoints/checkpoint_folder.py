"""The format of a checkpoint on disk.

A checkpoint is written to a hidden folder, its manifest last, and then renamed. So a folder with
the name of a step is complete.

checkpoints/step-000010/
    manifest.json           size and SHA-256 of every other file, SHA-256 of the manifest
    config.yaml             the configuration of the run
    trainer.json            RunState
    actor/  critic/         per rank: tensors (safetensors), counters and random state (JSON)
    reward/worker.json
    held/                   with async_rl.max_staleness > 0: sampled batches, see held_batches.py
    hf/                     the policy for users, as transformers or peft writes it

Users may add files to hf/. Any other file that the manifest does not name makes a checkpoint
invalid, since workers read all files of ranks that they find.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_protocol.support.disk_writes import fsync, write_errors
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_trainer.checkpoints.held_batches import INDEX, HeldBatches

FORMAT = 2
MANIFEST, CONFIG, RUN_STATE = "manifest.json", "config.yaml", "trainer.json"
USERS = "hf"
"""Folder for users."""
_NAME = re.compile(r"step-(\d{6,})")
_SAVING, _DELETING = ".saving-", ".deleting-"
_UNFINISHED = re.compile(rf"({re.escape(_SAVING)}|{re.escape(_DELETING)}){_NAME.pattern}")
writing = partial(
    write_errors,
    what="The checkpoint",
    remedy="Free some space, lower CheckpointWriter.keep, or set CheckpointWriter.folder to another place.",
)
"""writing(path): a context that turns disk errors into OutputError; see write_errors."""


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected size and digest of a file."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint. Unknown keys are ignored, so that later versions can add some."""

    format: int = FORMAT
    step: int
    score: float | None = None
    """Validation score at this step, higher is better; None: the step was not validated."""
    written: str
    """UTC, ISO 8601."""
    software: dict[str, str] = {}
    """Package -> version."""
    config_sha256: str
    inputs: dict[str, dict[str, str]] = {}
    """SHA-256 of the files that the run has read, by setting and path; empty: none or unknown."""
    files: dict[str, FileFacts]
    """Files by path below the folder, without the manifest."""
    digest: str = ""
    """SHA-256 of the manifest without this field: all keys, sorted, as JSON without blanks."""

    def sealed(self) -> bytes:
        """JSON with the digest filled in."""
        content = msgspec.to_builtins(self)
        content["digest"] = _digest(content)
        return msgspec.json.format(msgspec.json.encode(content), indent=1)


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The driver's place in the run.

    No group is in flight in a checkpoint. Batches that wait for their step are in HeldBatches.
    """

    step: int = 0
    """Steps done."""
    version: int = 0
    """Version of the weights: number of actor updates."""
    critic_updates: int = 0
    prompts_taken: int = 0
    """Prompts taken from the endless sequence so far."""
    prompts_untrained: tuple[int, ...] = ()
    """Places in that sequence which were taken for steps that are not done, by step; also those of
    HeldBatches.
    """
    prompt_order: bytes = b""
    """`PromptOrder.state`: of a curriculum that sees scores, what it has seen."""
    log_probs_agree: bool = True
    """Whether log-probs of rollout engine and actor agreed in the last step that compared them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def config(self) -> str:
        """The configuration of its run, YAML."""
        return (self.folder / CONFIG).read_text(encoding="utf-8")

    @property
    def run_state(self) -> RunState:
        """The driver's place in the run."""
        return msgspec.json.decode((self.folder / RUN_STATE).read_bytes(), type=RunState)

    @property
    def held(self) -> HeldBatches | None:
        """The batches that were sampled and not trained; None: there are none."""
        if INDEX not in self.manifest.files:
            return None
        return msgspec.msgpack.decode((self.folder / INDEX).read_bytes(), type=HeldBatches)


def step_name(step: int) -> str:
    """Folder name of a step; names sort as steps do."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a folder name; None for any other folder."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def saving_folder(final: Path) -> Path:
    """The hidden folder in which a checkpoint is written."""
    return final.with_name(f"{_SAVING}{final.name}")


def facts(path: Path) -> FileFacts:
    """Size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(path.stat().st_size, digest)


def durable(root: Path, files: Iterable[Path]) -> dict[str, FileFacts]:
    """Flush finished files to disk; returns their facts by path below `root`."""
    found: dict[str, FileFacts] = {}
    for path in files:
        fsync(path)
        found[path.relative_to(root).as_posix()] = facts(path)
    return found


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Turn a folder whose files are on disk into a checkpoint.

    Raises:
        OutputError: it can't be written.
    """
    with writing(final):
        for folder in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            fsync(folder)
        path = temporary / MANIFEST
        path.write_bytes(manifest.sealed())
        fsync(path)
        fsync(temporary)
        reach(FaultPoint.CHECKPOINT_SEALED)
        if final.exists():  # an invalid checkpoint of that step, skipped when the run was resumed
            remove(final)
        os.replace(temporary, final)  # noqa: PTH105 - Path.replace would hide that this is the atomic step
        fsync(final.parent)
    reach(FaultPoint.CHECKPOINT_PUBLISHED)


def remove(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that no partial checkpoint is ever visible."""
    doomed = folder.with_name(f"{_DELETING}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)  # noqa: PTH105 - see publish
    shutil.rmtree(doomed)


def sweep(checkpoints: Path) -> None:
    """Delete the unfinished folders of killed processes."""
    for folder in checkpoints.glob(".*-step-*"):
        if _UNFINISHED.fullmatch(folder.name):
            shutil.rmtree(folder)


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest, or why it can't be used."""
    try:
        content = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, Any])
        manifest = msgspec.convert(content, type=Manifest)
    except (*UNREADABLE, OSError) as error:
        return f"{MANIFEST} can't be read: {error}"
    if manifest.format != FORMAT:
        return f"its format is {manifest.format}, and this version reads {FORMAT}"
    if manifest.digest != _digest(content):
        return f"{MANIFEST} is not what was written: its SHA-256 differs"
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        return f"{MANIFEST} is that of step {manifest.step}, and the folder is named {folder.name}"
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def inspect(folder: Path) -> Checkpoint | str:
    """The checkpoint in that folder after all files are verified, or what is wrong with it."""
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if not {CONFIG, RUN_STATE} <= manifest.files.keys():
        return f"{MANIFEST} does not name {CONFIG} and {RUN_STATE}"
    if outside := [name for name in manifest.files if not _is_below(name)]:
        return f"{MANIFEST} names {outside[0]!r}, which is not below the folder"
    if unknown := sorted(_present(folder) - manifest.files.keys()):
        return f"{unknown[0]} is not named in {MANIFEST}"
    with ThreadPoolExecutor() as pool:
        for wrong in pool.map(partial(_difference, folder), manifest.files.items()):
            if wrong:
                return wrong
    checkpoint = Checkpoint(folder, manifest)
    try:
        step = checkpoint.run_state.step
    except UNREADABLE as error:
        return f"{RUN_STATE} can't be read: {error}"
    if step != manifest.step:
        return f"{RUN_STATE} is that of step {step}, {MANIFEST} of {manifest.step}"
    return _held_fault(checkpoint) or checkpoint


def _held_fault(checkpoint: Checkpoint) -> str:
    """What is wrong with the batches that were sampled; empty: nothing."""
    try:
        held = checkpoint.held
    except UNREADABLE as error:
        return f"{INDEX} can't be read: {error}"
    fault = held.fault(checkpoint.manifest.step, checkpoint.manifest.files) if held else ""
    return f"{INDEX} is wrong: {fault}" if fault else ""


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def _present(folder: Path) -> set[str]:
    """Files below the folders that workers read."""
    parts = [path for path in folder.iterdir() if path.is_dir() and path.name != USERS]
    return {path.relative_to(folder).as_posix() for part in parts for path in part.rglob("*") if not path.is_dir()}


def _difference(folder: Path, entry: tuple[str, FileFacts]) -> str:
    name, wanted = entry
    path = folder / name
    try:
        size = path.stat().st_size
        if size != wanted.num_bytes:
            return f"{name} has {size} bytes, and the manifest says {wanted.num_bytes}"
        return "" if facts(path) == wanted else f"{name} is not what was written: its SHA-256 differs"
    except OSError as error:
        return f"{name} can't be read: {error.strerror or error}"


def newest_whole(checkpoints: Path, before: int | None = None) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest valid checkpoint, and why each newer one (by name) was skipped.

    Args:
        checkpoints: their folder.
        before: only checkpoints of earlier steps than this one; None: of all steps.
    """
    skipped: dict[str, str] = {}
    steps = {step: path for path in checkpoints.glob("step-*") if (step := step_of(path.name)) is not None}
    for step in sorted(steps, reverse=True):
        if before is not None and step >= before:
            continue
        found = inspect(steps[step])
        if isinstance(found, Checkpoint):
            return found, skipped
        skipped[steps[step].name] = found
    return None, skipped


def superseded(scores: Mapping[int, float | None], keep: int) -> Sequence[int]:
    """Steps whose checkpoints can be deleted.

    The newest `keep` stay (0: all), and so does the one with the best score (the later of equals).
    """
    if not keep:
        return []
    scored = [(score, step) for step, score in scores.items() if score is not None]
    best = {max(scored)[1]} if scored else set[int]()
    return [step for step in sorted(scores) if step not in {*sorted(scores)[-keep:], *best}]


def prune(checkpoints: Path, keep: int, step: int) -> None:
    """Delete superseded checkpoints among those up to `step`, the newest one.

    A later one was damaged, and skipped when the run was resumed: it counts for none of those to
    keep. It is left alone, as folders that are no checkpoints are.
    """
    manifests = {path: read_manifest(path) for path in checkpoints.glob("step-*") if step_of(path.name) is not None}
    known = {path: found for path, found in manifests.items() if isinstance(found, Manifest) and found.step <= step}
    steps = {found.step: path for path, found in known.items()}
    scores = {found.step: found.score for found in known.values()}
    with writing(checkpoints):
        for old in superseded(scores, keep):
            remove(steps[old])
