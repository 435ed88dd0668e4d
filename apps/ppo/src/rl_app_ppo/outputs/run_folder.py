"""The folder of a run, `outputs/<run>/`: its paths, creation, lock and clean-up."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path

from rl_app_ppo.config.loading import to_yaml
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError, OutputError
from rl_protocol.support.disk_writes import write_errors
from rl_trainer.checkpoints.checkpoint_folder import sweep

OUTPUT_REMEDY = "Free some space, make the folder writable, or set trainer.output_dir to another place."
writing = partial(write_errors, what="What the run puts out", remedy=OUTPUT_REMEDY)
"""writing(path): translates OSErrors within into OutputErrors that name the path."""
logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints."""
MODEL = "checkpoint"
"""Name of the folder of the final model, as transformers or peft writes it."""

RECORD = "record"
"""Name of the folder of what a run records."""
UNPUBLISHED = ".checkpoint"
"""Name of the folder that the final model is written to before it is renamed."""
REPORT = "report.html"
"""Name of the report."""
_PROBE = ".probe"
JOURNAL = "journal"
"""Name of the folder of the data plane's journal."""
LOCK_S = 0.5
"""How long a run tries to lock its folder, seconds."""
_LOCK_AGAIN_S = 0.02
_MOST_RUNS = 3
"""Runs that a message names."""
ATTEMPTS = "attempts"
"""Name of the folder for the files of attempts that ended before a checkpoint."""
_OF_START = frozenset(
    {_PROBE, ATTEMPTS, RECORD, "config.yaml", "curve.png", "logs", "metrics.jsonl", REPORT, "tensorboard"}
)
"""Files and folders that a run may have before its first step."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run."""

    path: Path
    is_new: bool
    """Created for this run."""


def create_run_folder(folder: Path, *, resume: bool = False, named: bool = True) -> RunFolder:
    """Create the folder of a run, and check that it can be written.

    Args:
        folder: of this run, in that of all runs.
        resume: the folder may exist.
        named: the user has named it. Otherwise the folder gets a number if a run that has started
            in the same second has just made it.

    Raises:
        OutputError: as `check_new`, or it can't be written.
    """
    with writing(folder):
        is_new = not named or not folder.exists()
        if not named:
            folder = _made(folder)
        elif resume:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            check_new(folder)
            folder.mkdir(parents=True, exist_ok=not is_new)
        probe = folder / _PROBE
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    return RunFolder(folder, is_new)


def _made(folder: Path) -> Path:
    """A new folder of this name, or of the first name with a number that no other run takes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name in chain((folder.name,), (f"{folder.name}_{number}" for number in count(2))):
        with suppress(FileExistsError):
            folder.with_name(name).mkdir()
            return folder.with_name(name)
    raise AssertionError("there is always a further number")


def check_room(output_dir: Path, min_free_mb: int) -> str:
    """Check that the folder of all runs can be written and has room; returns what was found.

    Args:
        output_dir: the folder, which need not exist.
        min_free_mb: least free space, MiB.

    Raises:
        OutputError: it is no folder, can't be written, or has less free space.
    """
    with writing(output_dir):
        there = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free // 2**20
    if not there.is_dir():
        raise OutputError(f"{output_dir} can't be made: {there} is a file. Set trainer.output_dir to a folder.")
    if not os.access(there, os.W_OK):
        made = "" if there == output_dir else f"{output_dir} can't be made: "
        raise OutputError(
            f"{made}{there} can't be written. Make it writable, or set trainer.output_dir to another place."
        )
    if free < min_free_mb:
        raise OutputError(
            f"{output_dir} has {free} MiB of free space, less than trainer.min_free_disk_mb={min_free_mb}. "
            "Free some space or set trainer.output_dir to another place."
        )
    return f"{free} MiB free in {there}"


def check_new(folder: Path) -> None:
    """Check that there is no run folder of this name, unless its run ended while it started.

    Raises:
        OutputError: there is one.
    """
    if folder.exists() and not _only_started(folder):
        raise OutputError(
            f"{folder} exists already; nothing is overwritten. Set trainer.run_name to another name, or resume "
            "the run with trainer.resume_mode=auto."
        )


def _only_started(folder: Path) -> bool:
    """Whether the run of a folder has ended before it wrote metrics, checkpoints or a journal."""
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= _OF_START:
        return False
    metrics = RunFiles(folder=folder).metrics
    return not (metrics.exists() and metrics.stat().st_size) and is_free(folder)


@contextmanager
def occupied(folder: Path) -> Generator[None]:
    """Lock a run folder, and remove the partial files of a killed run.

    A file system without locks gets a warning instead. The lock is tried for LOCK_S, because
    `is_free` takes it for a moment.

    Raises:
        OutputError: another run holds the lock.
    """
    with writing(folder):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            _lock(lock)
        except BlockingIOError:
            raise OutputError(
                f"Another run writes to {folder}. Wait for its end, or set trainer.run_name to another name."
            ) from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): make sure that no other run writes there.", folder, error)
        remove_partial(folder)
        yield
    finally:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process would keep it with its file descriptor
        os.close(lock)


def remove_partial(folder: Path) -> None:
    """Remove the partial files of a run whose processes have ended.

    Raises:
        OutputError: one can't be removed.
    """
    with writing(folder):
        shutil.rmtree(folder / UNPUBLISHED, ignore_errors=True)
        for path in (folder / _PROBE, *folder.glob(f".{REPORT}.*")):
            path.unlink(missing_ok=True)
        sweep(folder / CHECKPOINTS)


def _lock(opened: int) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_AGAIN_S)


def is_free(folder: Path) -> bool:
    """Whether no run holds the lock of its folder; False where the file system has no locks.

    The lock is taken for a moment, in which a run that starts there waits (`occupied`).
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def set_aside(folder: Path) -> list[str]:
    """Move the files of an attempt without a checkpoint into `attempts/<number>/`, but for its
    journal, whose rows the next attempt uses.

    Returns:
        A note for the user; empty if there was nothing to move.
    """
    with writing(folder):
        left = [path for path in folder.iterdir() if path.name not in (ATTEMPTS, JOURNAL)]
        if not left:
            return []
        attempts = folder / ATTEMPTS
        attempts.mkdir(exist_ok=True)
        aside = attempts / str(1 + max((int(p.name) for p in attempts.iterdir() if p.name.isdecimal()), default=0))
        aside.mkdir()
        for path in left:
            os.replace(path, aside / path.name)  # noqa: PTH105 - see publish_folder
    return [f"the run ended before its first checkpoint, so it starts again; its files are in {aside}"]


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, so that no reader sees half of it.

    An existing folder of that name is replaced, and deleted last.
    """
    with writing(final):
        withdraw_folder(final)
        os.replace(temporary, final)  # noqa: PTH105 - Path.replace would hide that this is the atomic step
        shutil.rmtree(_withdrawn(final), ignore_errors=True)


def withdraw_folder(final: Path) -> None:
    """Hide a folder, if there is one, until `publish_folder` replaces it."""
    with writing(final):
        if final.exists():
            shutil.rmtree(_withdrawn(final), ignore_errors=True)
            os.replace(final, _withdrawn(final))  # noqa: PTH105 - see publish_folder


def _withdrawn(final: Path) -> Path:
    return final.with_name(f".old-{final.name}")


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Paths of one run, all below its folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.folder / "curve.png"

    @property
    def checkpoint(self) -> Path:
        return self.folder / MODEL

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def adapter(self) -> Path:
        """The PEFT folder of an adapter to start from that was in another format."""
        return self.folder / "adapter"

    @property
    def batches(self) -> Path:
        """The batches of steps, with trainer.keep_batches."""
        return self.folder / "batches"

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def record(self) -> Path:
        """What workers and driver record, for the report."""
        return self.folder / RECORD

    @property
    def report(self) -> Path:
        return self.folder / REPORT

    @property
    def journal(self) -> Path:
        """Of the data plane, if transfer_queue.durability is on and no journal_dir is set."""
        return self.folder / JOURNAL

    @property
    def profile(self) -> Path:
        return self.folder / "profile"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def attempts(self) -> Path:
        """The files of attempts that ended before a checkpoint."""
        return self.folder / ATTEMPTS

    @property
    def hang(self) -> Path:
        """The report about a run in which nothing moved."""
        return self.logs / "hang.txt"

    def written(self) -> dict[str, Path]:
        """The existing files and folders for the user, by name."""
        found = {
            "config": self.config,
            "metrics": self.metrics,
            "tensorboard": self.tensorboard,
            "curve": self.curve,
            "report": self.report,
            "samples": self.samples,
            "checkpoint": self.checkpoint,
            "resume from": self.checkpoints,
            "batches": self.batches,
            "logs": self.logs,
        }
        return {name: path for name, path in found.items() if path.exists()}


def files_of(folder: Path) -> RunFiles:
    """The files of a run that has begun, by the path of its folder.

    Raises:
        ConfigError: it is no folder of a run; names runs in it or beside it.
    """
    try:
        files = RunFiles(folder=folder.resolve())
        if files.config.is_file():
            return files
    except (OSError, RuntimeError) as error:  # a name that is too long; RuntimeError: links that lead to themselves
        raise ConfigError(f"{folder} is no folder of a run: {error}.") from error
    known = [run for place in (files.folder, files.folder.parent) for run in _newest_runs(place)]
    shown = f"; there are {', '.join(str(_short(run)) for run in known[:_MOST_RUNS])}" if known else ""
    raise ConfigError(
        f"{folder} is no folder of a run, which has a config.yaml. Give the folder that the run printed at its start{shown}."
    )


def _newest_runs(folder: Path) -> list[Path]:
    """The runs in a folder, the newest first."""
    found = [file for file in folder.glob("*/config.yaml") if file.is_file()]
    return [file.parent for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)]


def _short(path: Path) -> Path:
    """A path relative to the current folder if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_config(config: AppConfig, files: RunFiles) -> None:
    """Write the resolved configuration, the first file of a run."""
    with writing(files.config):
        files.config.write_text(to_yaml(config), encoding="utf-8")
        files.logs.mkdir(exist_ok=True)
