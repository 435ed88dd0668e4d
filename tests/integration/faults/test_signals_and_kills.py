"""After Ctrl-C, a killed worker or a killed driver, the output stays and no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from app_runs import marked, name_of, processes_of, started, words_of


@pytest.fixture
def long_run(tmp_path, base_model, mark):
    """Start a run of many steps; returns it and its metrics."""
    process = started(
        mark,
        tmp_path / "run",
        f"model.path={base_model}",
        "trainer.total_training_steps=100000",
        "data.val_size=16",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        "placement=separate",
        "actor.use_kl_loss=false",
        "trainer.stage_timeout_s=60",
        "restart.max_per_hour=0",
        "restart.heartbeat_s=0",  # a process that is stopped is named as stopped, not as killed
        "transfer_queue.timeout_s=8",
        lines=3,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    yield process, metrics
    if process.poll() is None:
        # Kills uv and the driver; all other processes end with the driver.
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_cleanly_and_keeps_what_was_written(long_run, how):
    process, metrics = long_run
    if how == signal.SIGINT:
        # as a terminal does: the whole foreground group gets the signal
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, (out, err)
    assert "interrupted" in err
    assert "Traceback" not in err + out
    # from Ray's own handler, which aborts the process 3 s later
    assert "received at time" not in err
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
    assert (metrics.parent / "curve.png").exists()
    assert list((metrics.parent / "tensorboard").glob("events*"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor", "rl_transferqueue.launch.server_process"])
def test_a_killed_process_ends_the_run_with_a_message(long_run, mark, victim):
    process, metrics = long_run
    if victim == "actor":
        os.kill(processes_of(metrics.parent, victim)[-1], signal.SIGKILL)
    else:
        next(p for p in marked(mark) if victim in " ".join(words_of(p))).kill()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, (out, err)
    assert err.startswith("the run failed: ")
    assert "restart.max_per_hour=0 allows no restart of the run." in err
    assert "Traceback" not in err + out


def listening(processes):
    """Return the TCP addresses these processes listen on, in the kernel's hexadecimal form."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    found = []
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if (link := str(fd.readlink())) in sockets:
                        found.append((sockets[link], name_of(process)))
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.slow
def test_a_local_ray_is_closed_to_others_and_named_when_it_dies(long_run, mark):
    process, _ = long_run
    ours = marked(mark)
    sockets = listening(ours)
    assert {name for _, name in sockets} >= {"raylet", "gcs_server"}
    assert [one for one in sockets if one[0] not in LOOPBACK] == []
    (raylet,) = [p for p in ours if name_of(p) == "raylet"]
    token = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])
    session = next(word for word in raylet.cmdline() if word.startswith("--session_dir=")).partition("=")[2]
    assert token.parent in Path(session).parents
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    assert len(token.read_text()) >= 32
    raylet.kill()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    named = rf"the run failed: The raylet of Ray \(process {raylet.pid}\) was killed by SIGKILL during .*step \d+"
    assert re.match(named, err), err
    assert "Traceback" not in err
    assert not token.parent.exists()


@pytest.mark.slow
def test_a_stopped_controller_is_named(long_run, mark):
    process, _ = long_run
    (controller,) = [p for p in marked(mark) if "ControllerSpec" in " ".join(words_of(p))]
    controller.suspend()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    named = rf"the run failed: The controller of the data plane \(process {controller.pid}\) is stopped .* during .*step \d+"
    assert re.match(named, err), err
    assert "Traceback" not in err


@pytest.mark.slow
def test_nothing_outlives_a_killed_driver(long_run, mark):
    process, _ = long_run
    assert len(marked(mark)) > 5
    (driver,) = [p for p in marked(mark) if "trainer.stage_timeout_s=60" in words_of(p) and name_of(p) != "uv"]
    driver.kill()
    process.communicate(timeout=300)  # the fixture `mark` checks what is left


@pytest.mark.slow
def test_a_killed_rank_is_named_and_not_only_the_socket_at_which_another_lost_it(tmp_path, base_model, mark):
    """Rank 0 fails first: gloo says that its peer has closed the connection."""
    process = started(
        mark,
        tmp_path / "run",
        f"model.path={base_model}",
        *("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "trainer.network_interface=lo"),
        *("data.val_size=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"),
        *("trainer.total_training_steps=100000", "trainer.stage_timeout_s=100", "rollout.num_workers=1"),
        *("placement=separate", "actor.use_kl_loss=false", "restart.max_per_hour=0"),
        lines=2,
    )
    victim = processes_of(tmp_path / "run", "actor-1")[-1]
    os.kill(victim, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, (out, err)
    assert re.match(
        rf"the run failed: .*Worker actor-1 (died|\(process {victim}\) (is gone|has ended)) .*during ", err
    ), err
