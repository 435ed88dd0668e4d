"""What a run writes: `outputs/<run>/` with config, metrics, TensorBoard events, curve and checkpoint."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rl_app_ppo.resume import CHECKPOINTS
from rl_protocol import OutputError
from rl_protocol.durable import write_errors
from rl_trainer.checkpoints.folder import sweep

writing = partial(
    write_errors,
    what="What the run puts out",
    remedy="Free some space, make the folder writable, or set trainer.output_dir to another place.",
)
"""writing(path): of what is done within, see write_errors."""
logger = logging.getLogger(__name__)
UNPUBLISHED = ".checkpoint"
"""Folder that the last checkpoint is written to before it gets its name."""
_PROBE = ".probe"
ATTEMPTS = "attempts"
"""Folder of a run for what attempts have left that ended before a checkpoint."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run writes."""

    path: Path
    is_new: bool
    """Made for this run."""


def create_run_folder(output_dir: Path, run_name: str, min_free_mb: int, *, go_on: bool = False) -> RunFolder:
    """Make the folder of a run and check that it can be written and has room. One that is refused is not made.

    Args:
        output_dir: where runs are.
        run_name: of this one.
        min_free_mb: least free space, MiB.
        go_on: the folder may be there already.

    Raises:
        OutputError: it exists already, can't be written, or the disk has less than `min_free_mb` MiB left.
    """
    folder = output_dir.expanduser() / run_name
    with writing(folder):
        is_new = not folder.exists()
        if not is_new and not go_on:
            raise OutputError(
                f"{folder} exists already; nothing is overwritten. Set trainer.run_name to another name, or go on with it: "
                "trainer.resume_mode=auto."
            )
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free // 2**20
        if free < min_free_mb:
            raise OutputError(
                f"{output_dir} has {free} MiB of free space, less than trainer.min_free_disk_mb={min_free_mb}. "
                "Free some space or set trainer.output_dir to another place."
            )
        folder.mkdir(parents=True, exist_ok=go_on)
        probe = folder / _PROBE
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    return RunFolder(folder, is_new)


@contextmanager
def occupied(folder: Path) -> Generator[None]:
    """Keep other runs out of a run folder, and remove what a killed run has left half-written there.

    Where the file system knows no locks, nothing keeps them out.

    Raises:
        OutputError: another run works there.
    """
    with writing(folder):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another run that has not ended writes to {folder}. Wait for its end, or set trainer.run_name to another name."
            ) from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): make sure that no other run writes there.", folder, error)
        with writing(folder):
            shutil.rmtree(folder / UNPUBLISHED, ignore_errors=True)
            (folder / _PROBE).unlink(missing_ok=True)
            sweep(folder / CHECKPOINTS)
        yield
    finally:
        os.close(lock)


def set_aside(folder: Path) -> list[str]:
    """Move what an attempt without a checkpoint has left in its run folder into `attempts/<number>/` there; says so, if there was anything."""
    with writing(folder):
        left = [path for path in folder.iterdir() if path.name != ATTEMPTS]
        if not left:
            return []
        attempts = folder / ATTEMPTS
        attempts.mkdir(exist_ok=True)
        aside = attempts / str(1 + max((int(p.name) for p in attempts.iterdir() if p.name.isdecimal()), default=0))
        aside.mkdir()
        for path in left:
            os.replace(path, aside / path.name)  # noqa: PTH105 - see publish_folder
    return [f"the run was ended before its first checkpoint, so it begins again; what it had written is in {aside}"]


def kept_metrics(path: Path, last_step: int) -> list[dict[str, float]]:
    """Cut a metrics file back to the lines up to `last_step`, whose later steps will happen again, and to those that are whole; returns them."""
    kept: list[dict[str, float]] = []
    with writing(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                break  # the run was killed while it wrote this one
            if record["step"] <= last_step:
                kept.append(record)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, path)  # noqa: PTH105 - see publish_folder
    return kept


class JSONLSink:
    """MetricSink: one JSON object per step, flushed at once, after the lines that are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file: TextIO | None = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is not None:
            with writing(self._path):
                self._file.write(json.dumps({"step": step, **metrics}) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with writing(self._path):
                file.close()


class TensorBoardSink:
    """MetricSink: an event file that `tensorboard --logdir` reads, record by record, so that a failing write is seen where it happens
    (tensorboard's own EventFileWriter writes from a thread that prints its errors). Where a run goes on `after` a step, readers are told to
    forget what an earlier file says of later ones."""

    def __init__(self, folder: Path, after: int | None = None) -> None:
        from tensorboard.compat.proto import (
            event_pb2,
            summary_pb2,
        )  # an import of a second, needed once a run is under way
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2  # generated at run time, unknown to type checkers
        self._summary: Any = summary_pb2
        self._folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"events.out.tfevents.{int(time.time())}.{platform.node() or 'host'}.{os.getpid()}"
            self._file = path.open("wb", buffering=0)
            self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if after is not None:
            self._write(step=after + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one event with all metrics."""
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with writing(self._folder):
            self._file.close()

    def _write(self, **content: object) -> None:
        if not self._file.closed:
            with writing(self._folder):
                self._records.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())


def publish_folder(temporary: Path, final: Path) -> None:
    """Move a finished folder to its name in one step, so that no reader sees half of it. One of that name is replaced, and deleted last."""
    old = final.with_name(f".old-{final.name}")
    with writing(final):
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.replace(final, old)  # noqa: PTH105 - as below
        os.replace(temporary, final)  # noqa: PTH105 - Path.replace would hide that this is the atomic step
        shutil.rmtree(old, ignore_errors=True)


def draw_curve(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> None:
    """Learning curves as a PNG; each curve is (step, value) points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import, needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=name)
    axes.set(xlabel="step", title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=120)
