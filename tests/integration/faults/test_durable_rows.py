"""A run with a journal (transfer_queue.durability) is killed and resumed on the same rows.

All processes are killed with SIGKILL at once. The resumed run generates only the prompts whose
responses were not finished, and ends bit-equal to the run that was not killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from app_runs import MARK, PATIENT, command, marked, nothing_left

from rl_trainer.checkpoints.checkpoint_folder import newest_whole, step_name
from rl_trainer.record.read_record import read_record

pytestmark = pytest.mark.timeout(900)
STEPS, BATCH, N, SAVE_FREQ = 6, 8, 4, 3
MODEL = Path("checkpoint", "model.safetensors")
LOG = "RL_TEST_SESSIONS"
"""Environment variable: the file that `SESSION` appends to."""
SESSION = """
import json, os
from rl_trainer.rollout.session_turns import SINGLE_TURN, SessionKind

async def run(row, generate):
    with open(os.environ["RL_TEST_SESSIONS"], "ab", buffering=0) as file:
        file.write(json.dumps(list(map(int, row.prompt_ids))).encode() + b"\\n")
    return await SINGLE_TURN.run(row, generate)

KIND = SessionKind(run)
"""
"""A session that notes which prompt it generates."""


@dataclass(frozen=True)
class Moment:
    """When all processes are killed.

    Attributes:
        lines: of metrics.jsonl, which has one per step.
        sessions: that have begun, of all steps.
        saving: the step whose checkpoint is being written; 0: none has to be.
        after_s: seconds after that.
    """

    lines: int = 0
    sessions: int = 0
    saving: int = 0
    after_s: float = 0.0

    def reached(self, folder: Path) -> bool:
        saving = folder / "checkpoints" / f".saving-{step_name(self.saving)}"
        return (
            count_lines(folder / "metrics.jsonl") >= self.lines
            and count_lines(Path(os.environ[LOG])) >= self.sessions
            and (not self.saving or saving.exists())
        )


def count_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def arguments(root: Path, name: str, base_model: Path | str, *more: str) -> list[str]:
    return command(
        PATIENT,
        f"model.path={base_model}",
        f"trainer.output_dir={root}",
        f"trainer.run_name={name}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.deterministic=true",
        "trainer.threads_per_worker=1",
        f"trainer.samples_per_step={BATCH * N}",
        "actor.optim.lr=1e-3",
        "actor.use_kl_loss=false",
        "data.val_size=8",
        f"data.train_batch_size={BATCH}",
        f"actor.ppo_mini_batch_size={BATCH}",
        f"rollout.n={N}",
        "rollout.session=noted",
        "rollout.num_workers=1",
        *more,
    )


def finish(root: Path, name: str, base_model: Path | str, mark: str, *more: str) -> str:
    done = subprocess.run(
        arguments(root, name, base_model, *more),
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, MARK: mark},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_at(moment: Moment, root: Path, name: str, base_model: Path | str, mark: str, *more: str) -> None:
    """Start a run, and kill all of its processes at this moment."""
    with (root / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            arguments(root, name, base_model, *more),
            stdout=log,
            stderr=log,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
        deadline = time.monotonic() + 500
        while not moment.reached(root / name):
            assert process.poll() is None, (root / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(moment.after_s)
        victims = marked(mark)
        for how in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the end of another
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(how)
        process.wait(timeout=300)


def sessions(log: Path) -> list[tuple[int, ...]]:
    """Prompts of the sessions that have begun, in this order."""
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def computed(folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps, without what depends on time, memory or the data plane."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "actor/", "critic/", "response_length/", "prompt_length/", "training/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]


def recorded(folder: Path) -> Counter[tuple[int, str, str]]:
    """(step, prompt, response) of the trajectories in the record of a run.

    A process that is killed does not write those of its last second.
    """
    return Counter((row.step, row.prompt, row.response) for row in read_record(folder / "record").trajectories)


@pytest.fixture
def noted(install_plugins, monkeypatch):
    site = install_plugins("rl_trainer.sessions", noted="noted_session:KIND")
    (site / "noted_session.py").write_text(SESSION)
    monkeypatch.setenv("PYTHONPATH", str(site))


@dataclass
class Straight:
    """A run that was not killed and has no journal."""

    folder: Path
    prompts: list[tuple[int, ...]]
    """Those that it has generated for training, one for each session."""


@pytest.fixture
def straight(noted, tmp_path, base_model, monkeypatch):
    def make(*more: str) -> Straight:
        log = tmp_path / "straight.sessions"
        monkeypatch.setenv(LOG, str(log))
        with nothing_left() as mark:
            finish(tmp_path, "straight", base_model, mark, *more)
        return Straight(tmp_path / "straight", sessions(log)[: STEPS * BATCH * N])  # validation comes last

    return make


def check_resumed(
    tmp_path: Path, base_model: Path | str, monkeypatch, moment: Moment, straight: Straight, *more: str
) -> None:
    """Kill a run at this moment, resume it, and compare it with the straight one."""
    folder, log = tmp_path / "run", tmp_path / "run.sessions"
    monkeypatch.setenv(LOG, str(log))
    keep = ("transfer_queue.durability=commit", "trainer.resume_mode=auto", *more)
    with nothing_left() as mark:
        kill_at(moment, tmp_path, "run", base_model, mark, *keep)
        found, _ = newest_whole(folder / "checkpoints")
        before = len(sessions(log))
        said = " ".join(finish(tmp_path, "run", base_model, mark, *keep).split())
    done = found.manifest.step if found is not None else 0

    wanted = Counter(straight.prompts)
    begun, later = (Counter(one for one in sessions(log)[start:] if one in wanted) for start in (0, before))
    assert begun >= wanted, "a prompt was skipped"
    assert (begun - wanted).total() <= N, "more was generated again than the one prompt that was being generated"
    note = re.search(
        r"used again: (\d+) prompts? with finished responses; started again: (\d+) unfinished prompts?", said
    )
    kept, restarted = map(int, note.groups()) if note is not None else (0, 0)
    assert "; discarded: " not in said
    assert later.total() == N * ((STEPS - done) * BATCH - kept)
    assert restarted <= 2 * BATCH

    mine, other = (recorded(run) for run in (folder, straight.folder))
    assert other.total() == STEPS * BATCH * N
    assert mine <= other, "other trajectories were trained on"
    assert sum(step > done for step, *_ in mine.elements()) == (STEPS - done) * BATCH * N
    assert computed(folder) == computed(straight.folder)
    assert (folder / MODEL).read_bytes() == (straight.folder / MODEL).read_bytes()
    (one, _), (two, _) = (newest_whole(run / "checkpoints") for run in (folder, straight.folder))
    assert one.manifest.step == two.manifest.step == STEPS
    assert one.manifest.files["trainer.json"] == two.manifest.files["trainer.json"]
    assert not (folder / "journal").exists()


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not_killed(tmp_path, base_model, monkeypatch, straight):
    """Killed after the fifth step: no checkpoint contains the rows of the last two."""
    check_resumed(tmp_path, base_model, monkeypatch, Moment(lines=5, after_s=0.05), straight())


def flip_bytes(folder: Path) -> None:
    """Damage the journal of a run at eight places where it wrote the rows of late steps.

    A single place might lie between two blocks.
    """
    segment = max((folder / "journal" / "segments").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(segment.read_bytes())
    used = len(content.rstrip(b"\0"))
    for percent in range(80, 96, 2):
        content[used * percent // 100] ^= 1
    segment.write_bytes(content)


@pytest.mark.nightly
def test_damaged_rows_are_said_and_generated_again_as_they_were(tmp_path, base_model, monkeypatch, straight):
    wanted, folder, log = straight(), tmp_path / "run", tmp_path / "run.sessions"
    monkeypatch.setenv(LOG, str(log))
    keep = ("transfer_queue.durability=commit", "trainer.resume_mode=auto")
    with nothing_left() as mark:
        kill_at(Moment(lines=5, after_s=0.05), tmp_path, "run", base_model, mark, *keep)
        flip_bytes(folder)
        before = len(sessions(log))
        said = " ".join(finish(tmp_path, "run", base_model, mark, *keep).split())
    assert re.search(r"[1-9]\d* damaged ones dropped", said)
    again = Counter(sessions(log)[:before]) & Counter(sessions(log)[before:])
    assert again.total() >= N, "no finished prompt was generated again"
    assert computed(folder) == computed(wanted.folder)
    assert (folder / MODEL).read_bytes() == (wanted.folder / MODEL).read_bytes()
    assert not (folder / "journal").exists()


MOMENTS = {
    "in the first rollout": Moment(sessions=3 * N + 1),
    "before the first checkpoint": Moment(lines=2, after_s=0.1),
    "in a later rollout": Moment(sessions=(4 * BATCH + 2) * N + 1),
    "after a rollout": Moment(sessions=5 * BATCH * N, after_s=0.1),
    "during a save": Moment(lines=2, saving=SAVE_FREQ),
    "during the last save": Moment(lines=5, saving=STEPS),
}


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("more", [(), ("async_rl.max_staleness=1",)], ids=["synchronous", "asynchronous"])
def test_at_any_moment(tmp_path, base_model, monkeypatch, straight, moment, more):
    check_resumed(tmp_path, base_model, monkeypatch, MOMENTS[moment], straight(*more), *more)
