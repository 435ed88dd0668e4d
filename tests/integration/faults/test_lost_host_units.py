"""The storage units of one of two hosts of a run are killed.

The run uses those of the other host; with a journal it loses no row. Without any unit a run with a
journal is resumed, and ends as an undisturbed one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
from app_runs import marked, started
from two_nodes import two_nodes

from rl_transferqueue.launch.find_plane import running_planes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
TWO_HOSTS = (
    *("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "checkpoint_engine.backend=tcp"),
    *("trainer.threads_per_worker=1", "placement=[actor+reward]", "rollout.num_workers=2"),
    *("actor.use_kl_loss=false", "trainer.val_before_train=false", "trainer.test_freq=0", "data.val_size=16"),
    *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8"),
)
JOURNAL = (
    *("transfer_queue.durability=commit", "trainer.save_freq=4", "trainer.resume_mode=auto"),
    *("trainer.deterministic=true", "actor.optim.lr=1e-3"),
)
STEPS = 12


def units_of(logs: Path) -> list[psutil.Process]:
    """The processes that write the logs of a host's storage units."""
    found = []
    for process in psutil.process_iter():
        try:
            files = [Path(file.path) for file in process.open_files()]
        except psutil.Error:
            continue
        if (
            any(logs in file.parents for file in files)
            and "rl_transferqueue.launch.server_process" in process.cmdline()
        ):
            found.append(process)
    return found


def test_a_run_goes_on_when_the_units_of_its_second_host_die(tmp_path, base_model, mark, monkeypatch):
    monkeypatch.setenv("RL_HOST", "a")
    folder = tmp_path / "run"
    options = (
        *TWO_HOSTS,
        f"model.path={base_model}",
        f"trainer.total_training_steps={STEPS}",
        "restart.max_per_hour=0",
    )
    with two_nodes("a", "b", num_cpus=2) as address:
        run = started(mark, folder, *options, f"ray.address={address}", lines=2)
        try:
            units = units_of(folder / "logs" / "units-1")
            for unit in units:
                os.kill(unit.pid, signal.SIGKILL)
            out, err = run.communicate(timeout=400)
        finally:
            run.kill()
            run.communicate()
    assert run.returncode == 0, (out, err)
    assert len(units) == 2
    assert steps_of(folder) == list(range(1, STEPS + 1))
    said = "\n".join(log.read_text() for log in (folder / "logs").rglob("*.log"))
    assert len(re.findall(r"storage unit \d at 127.0.0.1:\d+ has ended; rows in it are lost", said)) == len(units)


def units_with_journal(mark: str) -> list[int]:
    """The processes of the storage units of the run with this mark, of both hosts."""
    pids = {process.pid for process in marked(mark)}
    (plane,) = [found for found in running_planes().values() if found.controller.process.pid in pids]
    return [unit.process.pid for unit in plane.units]


def test_a_run_that_loses_all_units_names_them_and_resumes_from_its_journal(tmp_path, base_model, mark, monkeypatch):
    """It starts again by itself, or with `restart.max_per_hour=0` by the same command. With the
    units of the driver's host it goes on."""
    monkeypatch.setenv("RL_HOST", "a")
    options = (*TWO_HOSTS, *JOURNAL, f"model.path={base_model}", f"trainer.total_training_steps={STEPS}")
    ended, killed = dict[str, tuple[int, str, str]](), dict[str, int]()
    with two_nodes("a", "b", num_cpus=2) as address:

        def run(name: str, *more: str, lines: int, kill: bool, only_second: bool = False) -> None:
            one = started(mark, tmp_path / name, *options, f"ray.address={address}", *more, lines=lines)
            try:
                second = [unit.pid for unit in units_of(tmp_path / name / "logs" / "units-1")]
                for unit in (second if only_second else units_with_journal(mark)) if kill else ():
                    os.kill(unit, signal.SIGKILL)
                killed[name] = len(second)
                out, err = one.communicate(timeout=400)
            finally:
                one.kill()
                one.communicate()
            ended[name] = one.returncode, out, err

        run("undisturbed", lines=1, kill=False)
        run("goes-on", "restart.max_per_hour=0", lines=6, kill=True, only_second=True)
        run("restarts", "restart.backoff_s=0.1", lines=6, kill=True)
        run("ends", "restart.max_per_hour=0", lines=6, kill=True)
        code, _, err = ended["ends"]
        assert code == 1, err
        assert_named(err)
        run("ends", lines=6, kill=False)
    for name, (code, out, err) in ended.items():
        assert code == 0, (name, out, err)
    assert_named(ended["restarts"][1])
    assert killed["goes-on"] == 2
    same_weights(tmp_path, "goes-on")
    for name in ("restarts", "ends"):
        out = " ".join(ended[name][1].split())
        assert re.search(r"journal: [1-9]\d* rows kept, .* used again: [1-9]\d* prompts? with finished responses", out)
        same_weights(tmp_path, name)


def same_weights(runs: Path, name: str) -> None:
    """The run took all steps, and ended as the undisturbed one."""
    assert steps_of(runs / name) == list(range(1, STEPS + 1))
    model = Path("checkpoint", "model.safetensors")
    assert (runs / name / model).read_bytes() == (runs / "undisturbed" / model).read_bytes()


def assert_named(said: str) -> None:
    """Both units are named, with their host and how they ended."""
    for unit in range(2):
        name = rf"Storage unit {unit} of the data plane on {re.escape(socket.gethostname())} \(process \d+\)"
        assert re.search(f"{name} was killed by SIGKILL", said), said


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
