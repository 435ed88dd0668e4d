"""Planes of two revisions of this repository, side by side."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from harness.pairs import Subject, paired, summary, take_turns, verdict

ROOT = Path(__file__).parents[2]
SOURCES = ("packages/rl-protocol/src", "packages/rl-transferqueue/src")
QUESTIONS = (
    ("put", 1 << 10, 512),
    ("put", 1 << 20, 64),
    ("put", 128 << 20, 4),
    ("get", 1 << 10, 512),
    ("get", 1 << 20, 128),
)
"""What, bytes of a call, calls of a turn."""
MUST, AIM = 1.05, 1.0
"""Time of this revision over that of the other one."""


class Plane:
    """A plane of the sources in a folder; see peers/plane_of_revision.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pids = [int(word) for word in self._read().split()]

    def call(self, what: str, nbytes: int, calls: int) -> None:
        """Have it make calls, and wait for their end."""
        print(what, nbytes, calls, file=_open(self._process.stdin), flush=True)
        assert self._read() == "done\n"

    def _read(self) -> str:
        if line := _open(self._process.stdout).readline():
            return line
        raise ChildProcessError(f"the plane has ended with code {self._process.wait()}; see above")


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def plane_of(folder: Path) -> Generator[Plane]:
    """The plane of the sources in a folder."""
    paths = os.pathsep.join(str(folder / source) for source in SOURCES)
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "peers" / "plane_of_revision.py")]
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Plane(process)
        finally:
            _open(process.stdin).close()
            process.wait(60)


def sources_of(revision: str, folder: Path) -> None:
    """Write the sources of a revision to a folder.

    Raises:
        CalledProcessError: git does not know the revision.
    """
    archive = subprocess.run(["git", "archive", revision, *SOURCES], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def compare_with(revision: str, pairs: int, *, smoke: bool) -> list[dict[str, Any]]:
    """Puts and gets of this revision against those of another one; a row for each question.

    Raises:
        CalledProcessError: git does not know the revision.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        sources_of(revision, Path(name))
        with plane_of(ROOT) as now, plane_of(Path(name)) as then:
            for what, nbytes, calls in QUESTIONS[:2] if smoke else QUESTIONS:
                subjects = [
                    Subject(label, partial(plane.call, what, nbytes, 8 if smoke else calls), plane.pids)
                    for label, plane in (("now", now), ("then", then))
                ]
                timings = take_turns(subjects, pairs)
                ratio, cpu = paired(timings, "now", "then"), paired(timings, "now", "then", "cpu")
                question = f"{what} of {nbytes} bytes, time over that of {revision}"
                rows.append(
                    verdict(
                        question,
                        ratio["median"],
                        MUST,
                        AIM,
                        at_least=False,
                        ratio=ratio,
                        cpu_ratio=cpu,
                        **summary(timings),
                    )
                )
    return rows
