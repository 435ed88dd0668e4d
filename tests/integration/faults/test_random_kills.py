"""The demo is killed with SIGKILL at random moments and resumed, and ends as an undisturbed run.

A victim is one process of the run, whichever, or all of them at once. The final parameters are
bit-equal to those of the undisturbed run, every step has trained on the same prompts, and no
response is generated again but those of generations that were in flight at a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest
from app_runs import MARK, PATIENT, marked, nothing_left, processes_of, words_of

from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.record.read_record import read_record

BATCH, N = 4, 2
MODEL = Path("checkpoint", "model.safetensors")
LAST_RUNS = Path(__file__).with_name("random_kills_last_run.json")
"""What the kills of the nightly runs have cut off, by max_staleness."""
CALLS = "RL_TEST_CALLS"
"""Environment variable: the file that `SESSION` appends to."""
SESSION = """
import json, os
from rl_trainer.rollout.session_turns import SINGLE_TURN as KIND
from rl_trainer.workers.rollout import RolloutWorker

generate = RolloutWorker.rollout

def note(kind, call, tokens=0):
    (uid,) = {prompt.lease.uid for prompt in call.prompts}
    with open(os.environ["RL_TEST_CALLS"], "ab", buffering=0) as file:
        file.write(json.dumps({"kind": kind, "uid": uid, "pid": os.getpid(), "tokens": tokens}).encode() + b"\\n")

async def rollout(self, call):
    note("begun", call)
    result = await generate(self, call)
    note("settled", call, result.tokens)
    return result

RolloutWorker.rollout = rollout
"""
"""A session that notes when the generation of a prompt begins, and when its responses are
acknowledged by the data plane."""


class Call(msgspec.Struct, frozen=True):
    """A line of CALLS."""

    kind: str
    uid: str
    pid: int
    tokens: int
    """Of the responses, once they are acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Generations:
    """What has been generated in a run, by prompt."""

    in_flight: Counter[str]
    """Generations that a kill has cut off: they were never acknowledged to their worker."""
    again: Counter[str]
    """Generations after the first."""
    tokens: dict[str, int]
    """Of the responses to each prompt."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Generations:
        begun, settled = (
            Counter((one.pid, one.uid) for one in calls if one.kind == kind) for kind in ("begun", "settled")
        )
        by_prompt = Counter[str]()
        for (_, uid), count in begun.items():
            by_prompt[uid] += count
        in_flight = Counter[str]()
        for (_, uid), count in (begun - settled).items():
            in_flight[uid] += count
        return cls(
            in_flight=in_flight,
            again=Counter({uid: count - 1 for uid, count in by_prompt.items() if count > 1}),
            tokens={one.uid: one.tokens for one in calls if one.kind == "settled"},
        )

    def facts(self) -> dict[str, int]:
        """For the table of runs.

        A generation in flight that was not generated again had reached the journal, and its worker
        was killed before it got the acknowledgement.
        """
        return {
            "generations in flight": self.in_flight.total(),
            "generated again": self.again.total(),
            "in the journal, not acknowledged": (self.in_flight - self.again).total(),
            "tokens generated again": sum(self.tokens[uid] * count for uid, count in self.again.items()),
            "tokens in flight and not in the journal": sum(
                self.tokens[uid] * count for uid, count in (self.in_flight & self.again).items()
            ),
        }


def test_a_generation_counts_as_in_flight_unless_its_own_process_had_it_acknowledged():
    calls = [
        Call("begun", "a", 1, 0),
        Call("settled", "a", 1, 7),
        Call("begun", "b", 1, 0),
        Call("begun", "c", 1, 0),
        Call("begun", "b", 2, 0),
        Call("settled", "b", 2, 5),
    ]
    found = Generations.of(calls)
    assert (found.in_flight, found.again) == (Counter(b=1, c=1), Counter(b=1))
    assert found.facts() == {
        "generations in flight": 2,
        "generated again": 1,
        "in the journal, not acknowledged": 1,
        "tokens generated again": 5,
        "tokens in flight and not in the journal": 5,
    }


@dataclass
class Kills:
    """Starts a run, kills its processes at random moments, and starts it again until it ends.

    Attributes:
        command: starts or resumes it.
        folder: of the run.
        mark: of its processes.
        draw: decides victims and moments.
        killed: names of the victims of each kill.
        starts: how often it was started.
    """

    command: Sequence[str]
    folder: Path
    mark: str
    draw: random.Random
    killed: list[list[str]] = field(default_factory=list)
    starts: int = 0

    def run(self, kills: int) -> None:
        """Kill it so many times, then let it end."""
        process = self._start()
        while len(self.killed) < kills:
            if self._reached(process):
                self._kill()
            assert process.poll() != 0, f"the run ended after {len(self.killed)} kills"
            if process.poll() is not None:
                process = self._start()
        while process.wait(timeout=500) != 0:
            process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        assert self.starts <= 3 * len(self.killed) + 1, self._log.read_text()[-5000:]
        with self._log.open("a") as log:
            environment = {**os.environ, MARK: self.mark}
            return subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, cwd=self.folder.parent, start_new_session=True
            )

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _reached(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the next moment: some generations and seconds from now; False: the run ended."""
        more = self.draw.randrange(0, 10)
        wanted, later = _lines(Path(os.environ[CALLS])) + more, self.draw.uniform(0, 0.5 if more else 10)
        deadline = time.monotonic() + 500
        while _lines(Path(os.environ[CALLS])) < wanted:
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self._log.read_text()[-5000:]
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=later)
        return process.poll() is None

    def _kill(self) -> None:
        """Kill one process, or all at once: none of them sees the end of another."""
        alive = sorted(marked(self.mark), key=lambda one: one.pid)
        victims = alive if not self.draw.randrange(3) else [self.draw.choice(alive)] if alive else []
        names = [self._name_of(victim) for victim in victims]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(how)
        if victims:
            self.killed.append(sorted(names))

    def _name_of(self, victim: psutil.Process) -> str:
        for log in self.folder.glob("logs/*.log"):
            if victim.pid in processes_of(self.folder, log.stem):
                return log.stem
        words = words_of(victim)
        if "rl_transferqueue.launch.server_process" in words:
            return "data plane"
        if words[1:3] == list(self.command[:2]):
            return "driver"
        return Path(words[0]).name.split(":")[0] if words else "ended"


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def arguments(folder: Path, base_model: Path, steps: int, *more: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("rl")),
        "train",
        PATIENT,
        f"model.path={base_model}",
        f"trainer.output_dir={folder.parent}",
        f"trainer.run_name={folder.name}",
        f"trainer.total_training_steps={steps}",
        f"trainer.samples_per_step={BATCH * N}",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.deterministic=true",
        "trainer.threads_per_worker=1",
        "actor.optim.lr=1e-3",
        "actor.use_kl_loss=false",
        "data.val_size=4",
        f"data.train_batch_size={BATCH}",
        f"actor.ppo_mini_batch_size={BATCH}",
        f"rollout.n={N}",
        "rollout.session=noted",
        "rollout.num_workers=1",
        "placement=separate",
        "transfer_queue.durability=commit",
        *more,
    ]


def calls_of(file: Path) -> list[Call]:
    """Those of training; validation comes last and has other uids."""
    decoder = msgspec.json.Decoder(Call)
    return [call for call in decoder.decode_lines(file.read_bytes()) if call.uid.startswith("s")]


def computed(folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps that depend on neither time nor memory."""
    kept = ("step", "actor/", "critic/", "response_length/", "prompt_length/")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]


def trained(folder: Path) -> Counter[tuple[int, str, str]]:
    """(step, prompt, response); a process that is killed does not write those of its last
    second."""
    return Counter((row.step, row.prompt, row.response) for row in read_record(folder / "record").trajectories)


@pytest.fixture
def noted(install_plugins, monkeypatch):
    site = install_plugins("rl_trainer.sessions", noted="noted_session:KIND")
    (site / "noted_session.py").write_text(SESSION)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)


@pytest.mark.timeout(5000)
@pytest.mark.parametrize(
    ("steps", "kills", "staleness"),
    [
        pytest.param(8, 3, 1, marks=pytest.mark.nightly),
        pytest.param(60, 20, 0, marks=pytest.mark.nightly),
        pytest.param(60, 20, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_was_not(
    noted, tmp_path, base_model, monkeypatch, steps, kills, staleness
):
    more, folders = (f"async_rl.max_staleness={staleness}",), [tmp_path / name for name in ("straight", "killed")]
    with nothing_left() as mark:
        monkeypatch.setenv(CALLS, str(tmp_path / "straight.calls"))
        straight = Kills(arguments(folders[0], base_model, steps, *more), folders[0], mark, random.Random())
        straight.run(0)
        monkeypatch.setenv(CALLS, str(tmp_path / "killed.calls"))
        command = arguments(folders[1], base_model, steps, *more, "trainer.resume_mode=auto")
        killed = Kills(command, folders[1], mark, random.Random(kills + staleness))
        killed.run(kills)
    generations = Generations.of(calls_of(tmp_path / "killed.calls"))
    facts = {"steps": steps, "max_staleness": staleness, "starts": killed.starts, **generations.facts()}
    facts["victims"] = dict(Counter("all at once" if len(names) > 1 else names[0] for names in killed.killed))
    assert {call.uid for call in calls_of(tmp_path / "straight.calls")} == generations.tokens.keys() | (
        generations.in_flight - generations.again
    ).keys(), "a prompt was skipped, or another one was generated"
    assert generations.again <= generations.in_flight, "a finished response was generated again"
    one, other = (trained(folder) for folder in folders)
    assert one.total() == steps * BATCH * N
    assert other <= one, "other trajectories were trained on"
    assert computed(folders[1]) == computed(folders[0])
    assert (folders[1] / MODEL).read_bytes() == (folders[0] / MODEL).read_bytes()
    (mine, _), (wanted, _) = (newest_whole(folder / "checkpoints") for folder in reversed(folders))
    assert mine.manifest.step == wanted.manifest.step == steps
    assert mine.manifest.files["trainer.json"] == wanted.manifest.files["trainer.json"]
    assert not (folders[1] / "journal").exists()
    if kills >= 20:
        before = json.loads(LAST_RUNS.read_text()) if LAST_RUNS.exists() else {}
        LAST_RUNS.write_text(json.dumps({**before, str(staleness): facts}, indent=2) + "\n")
