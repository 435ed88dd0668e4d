"""Runs of the whole application, with Ray, at the size of a demo (`runner.Subject`)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil

from rl_app_ppo.chaos.judge import Counted, Kind
from rl_app_ppo.chaos.processes import marked
from rl_app_ppo.chaos.schedule import APP_CELLS, Fault, Pace
from rl_app_ppo.chaos.strikes import flip_byte, flippable
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol import RLError
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_rows import TrajectoryRow
from rl_transferqueue.launch.server_specs import ServeConfig, UnitSpec

STEPS, BATCH, N, SAVE_FREQ = 4, 4, 2, 2
PACE = Pace(events=STEPS + 1, spread_s=0.5, passes=0.5, cells=APP_CELLS)
_NAME = "run"
_SERVER = "rl_transferqueue.launch.server_process"
_WORKER = re.compile(r"worker (\S+) starts as [\w, ]+, process (\d+)")
_HELD = re.compile(r"prompts finished = \d+ trained \+ \d+ dropped \+ (\d+) held")
_VICTIMS = {"actor": "trainer", "ref": "reference"}
"""What a worker is called as a victim, where it has another name."""


@dataclass(frozen=True, slots=True)
class Straight:
    """A run without faults."""

    weights: str
    """Digest of the final model."""
    trained: Counter[tuple[int, str, str]]
    """(step, prompt, response) of its trajectories."""


class AppSubject:
    """`rl train` with a journal, deterministic.

    Args:
        folder: where the folder of the run is made.
        max_staleness: see Schedule.
        straight: what it must train; None: this is the run without faults.
        save_freq: steps between checkpoints.
    """

    kind: Kind = "app"
    start_s = 300.0

    def __init__(self, folder: Path, max_staleness: int, straight: Straight | None, save_freq: int = SAVE_FREQ) -> None:
        self._folder = folder
        self._max_staleness = max_staleness
        self._straight = straight
        self._save_freq = save_freq
        self._flipped = False
        self._sockets = Path(tempfile.mkdtemp(prefix="rlc", dir="/tmp"))

    @cached_property
    def run_files(self) -> RunFiles:
        """Those of the run."""
        return RunFiles(folder=self._folder / _NAME)

    def command(self) -> Sequence[str]:
        """Start or resume it."""
        return [
            str(Path(sys.executable).with_name("rl")),
            "train",
            f"trainer.output_dir={self._folder}",
            f"trainer.run_name={_NAME}",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.save_freq={self._save_freq}",
            f"trainer.samples_per_step={BATCH * N}",
            "trainer.resume_mode=auto",
            "trainer.val_before_train=false",
            "trainer.test_freq=0",
            "trainer.deterministic=true",
            "trainer.threads_per_worker=1",
            "actor.optim.lr=1e-3",
            "algorithm=ppo",  # with KL loss: every kind of process
            "actor.use_kl_loss=true",
            "data.val_size=4",
            f"data.train_batch_size={BATCH}",
            f"actor.ppo_mini_batch_size={BATCH}",
            f"critic.ppo_mini_batch_size={BATCH}",
            f"rollout.n={N}",
            "rollout.num_workers=1",
            "placement=separate",
            "ray.start_timeout_s=200",
            "transfer_queue.durability=commit",
            "transfer_queue.verify=true",
            f"async_rl.max_staleness={self._max_staleness}",
        ]

    def environment(self) -> Mapping[str, str]:
        """A folder for Ray, whose path is short: those of its sockets have at most 107 bytes."""
        return {"RAY_TMPDIR": str(self._sockets)}

    def events(self) -> int:
        """Once the first step can begin, one and the lines of metrics."""
        try:
            return 1 + self.run_files.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def processes(self, mark: str) -> Mapping[str, int]:
        """Driver, workers as their logs name them, and the servers of the data plane."""
        found = dict[str, int]()
        for log in self.run_files.logs.glob("*.log"):
            for line in _WORKER.finditer(log.read_text(errors="replace")):
                found[_VICTIMS.get(line[1], line[1])] = int(line[2])
        for pid in marked(mark):
            words = _words(pid)
            if _SERVER in words:
                spec = msgspec.json.decode(words[-1], type=ServeConfig).spec
                found[f"storage-{spec.index}" if isinstance(spec, UnitSpec) else "controller"] = pid
            elif len(words) > 2 and words[2] == "train" and Path(words[1]).name == "rl":
                found["driver"] = pid
        return found

    def files(self, fault: Fault) -> Sequence[Path]:
        """Segments of the journal, or the newest of several checkpoints: a run whose only one is
        damaged is refused."""
        if fault is Fault.FLIP_CHECKPOINT and len([*self.run_files.checkpoints.glob("step-*")]) < 2:
            return []
        return flippable(fault, self.run_files.journal, self.run_files.checkpoints)

    def flip(self, fault: Fault, which: int) -> bool:
        """Change a byte."""
        self._flipped = self._flipped or fault is Fault.FLIP_CHECKPOINT
        return flip_byte(self.files(fault), which)

    def left(self) -> Sequence[str]:
        """The journal, folders of Ray, and checkpoints that were never published."""
        files = [*self.run_files.checkpoints.glob(".*"), *self._sockets.iterdir(), self.run_files.journal]
        left = [str(path) for path in files if path.exists()]
        shutil.rmtree(self._sockets)
        return left

    def straight(self) -> Straight:
        """What the finished run has trained.

        Raises:
            RLError: it has no model.
        """
        try:
            model = (self.run_files.checkpoint / "model.safetensors").read_bytes()
        except FileNotFoundError as error:
            raise RLError(f"The run in {self.run_files.folder} has not ended: {error}.") from error
        return Straight(hashlib.sha256(model).hexdigest(), self._trained())

    def count(self) -> Counted:
        """Compare it with the run without faults.

        Equal weights are of the same responses. Where they differ, the record tells which are
        missing of the steps after the checkpoint of the last start; it may lack the last second of
        a process that was killed. A start goes back if the checkpoint before it was newer, unless a
        byte of that was changed; a trajectory, if its weights are older than max_staleness allows.
        """
        assert self._straight is not None
        wanted, trained, weights = self._straight.trained, self._trained(), ""
        with suppress(RLError):
            weights = self.straight().weights
        record = read_record(self.run_files.record)
        starts = [0, *(start.after for start in record.starts)]
        back = sum(after < before for before, after in pairwise(starts)) if not self._flipped else 0
        back += sum(_oldest(row) < row.step - 1 - self._max_staleness for row in record.trajectories)
        differ = weights != self._straight.weights
        late = [Counter({row: n for row, n in rows.items() if row[0] > starts[-1]}) for rows in (wanted, trained)]
        found, _ = newest_whole(self.run_files.checkpoints)
        log = "".join(path.read_text(errors="replace") for path in self.run_files.logs.glob("driver.log"))
        return Counted(
            acknowledged=trained.total(),
            trained=trained.total(),
            lost=(late[0] - late[1]).total() if differ else 0,
            doubled=(trained - wanted).total(),
            held=int([0, *_HELD.findall(log)][-1]),
            went_back=back + int(found is None or found.manifest.step != STEPS),
            weights_differ=differ,
        )

    def _trained(self) -> Counter[tuple[int, str, str]]:
        rows = read_record(self.run_files.record).trajectories
        return Counter((row.step, row.prompt, row.response) for row in rows)


def run_straight(folder: Path, max_staleness: int) -> Straight:
    """Run it without faults.

    Raises:
        RLError: it failed; has what it wrote.
    """
    subject = AppSubject(folder, max_staleness, None)
    environment = {**os.environ, **subject.environment()}
    done = subprocess.run(
        subject.command(), capture_output=True, text=True, check=False, timeout=subject.start_s, env=environment
    )
    subject.left()
    if done.returncode:
        raise RLError(f"A run without faults failed with status {done.returncode}: {done.stderr[-2000:]}")
    return subject.straight()


def _oldest(row: TrajectoryRow) -> int:
    """The oldest weights that generated a trajectory."""
    return min(version for version, _ in row.versions)


def _words(pid: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []
