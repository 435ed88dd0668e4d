"""If a run fails because a process is gone, the error names the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.lost_processes import ended, ended_with, fate, named_losses, named_remote_losses, unless_ended
from rl_app_ppo.driver.restart_policy import RestartLimitError
from rl_protocol import ConfigError, HangError, PlaneTimeout, RLError, WorkerDiedError, WorkerError
from rl_protocol.support.host.portable import uses_linux


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


KILLED = "was killed by SIGKILL" if uses_linux() else "has ended"


def until(pid, what):
    deadline = time.monotonic() + 60
    while what not in fate(pid):
        assert time.monotonic() < deadline, fate(pid)
        time.sleep(0.01)


def failed(child, what):
    until(child.pid, what)
    error, first = PlaneTimeout("no answer within 60 s."), PlaneTimeout("no answer, either.")
    first.add_note("stage gen")
    error.add_note("step 3")
    error.__context__ = first  # the cleanup failed too
    named = rf"The controller \(process {child.pid}\) {what}.* during stage gen, step 3\. Because of that: no answer"
    with (
        pytest.raises(WorkerDiedError, match=named),
        named_losses(lambda: {child.pid: "The controller", os.getpid(): "This one"}, HungProcesses()),
    ):
        raise error


def test_a_killed_process_is_named(child):
    child.send_signal(signal.SIGKILL)
    failed(child, KILLED)
    assert child.wait(60) == -signal.SIGKILL  # the parent can still reap it
    assert fate(child.pid) == "is gone"


def test_a_stopped_process_is_named(child):
    child.send_signal(signal.SIGSTOP)
    failed(child, "is stopped")
    child.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    while fate(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_death_that_the_error_names_is_not_named_again(child):
    child.kill()
    until(child.pid, KILLED)
    died = WorkerDiedError("Worker actor died during update_actor.")
    with (
        pytest.raises(WorkerDiedError) as caught,
        named_losses(lambda: {child.pid: "Worker actor"}, HungProcesses(), deaths_named=True),
    ):
        raise died
    assert caught.value is died


def test_one_that_ended_is_named_with_its_code(child):
    child.stdin.close()
    child.stdin = None
    failed(child, "ended with code 3" if uses_linux() else "has ended")


def test_other_errors_stay_what_they_are(child):
    with (
        pytest.raises(PlaneTimeout, match=r"^slow$"),
        named_losses(lambda: {child.pid: "The controller"}, HungProcesses()),
    ):
        raise PlaneTimeout("slow")
    child.kill()
    until(child.pid, KILLED)
    with (
        pytest.raises(ConfigError, match=r"^a setting$"),
        named_losses(lambda: {child.pid: "The controller"}, HungProcesses()),
    ):
        raise ConfigError("a setting")


def test_a_process_behind_a_wait_that_was_too_long_is_named_once(child):
    child.send_signal(signal.SIGSTOP)
    until(child.pid, "is stopped")
    names, late = {child.pid: "Worker rollout-0"}, HangError("The driver has waited for the next batch for 60 s.")
    stopped = rf"Worker rollout-0 \(process {child.pid}\) is stopped"
    with (
        pytest.raises(WorkerDiedError, match=rf"^{stopped} .*\. Because of that: The driver has waited .* 60 s\.$"),
        named_losses(lambda: names, HungProcesses()),  # of the run, and around it
        named_losses(lambda: names, HungProcesses()),
    ):
        raise late
    limit = RestartLimitError("Rollout worker rollout-0 is lost and gets no new process: it did not answer.")
    with (
        pytest.raises(RestartLimitError, match=rf"^{stopped} .*\. Because of that: Rollout worker rollout-0 is lost"),
        named_losses(lambda: names, HungProcesses(), deaths_named=True),
    ):
        raise limit
    report = HangError(f"Nothing has moved for 5 s. Waiting:\n  rollout-0 (process {child.pid}) is stopped")
    with pytest.raises(HangError) as caught, named_losses(lambda: names, HungProcesses()):
        raise report
    assert caught.value is report


def test_a_process_that_was_killed_since_it_hung_did_not_just_end(child, tmp_path):
    hung = HungProcesses()
    hung.add(Watched("The controller", child.pid, tmp_path / "beat"), 5.0)
    child.kill()
    until(child.pid, KILLED)
    end = rf"The controller \(process {child.pid}\) hung for 5 s \(restart\.heartbeat_s\) and was therefore killed"
    with (
        pytest.raises(WorkerDiedError, match=rf"^{end}\. Because of that: slow$"),
        named_losses(lambda: {child.pid: "The controller"}, hung),
    ):
        raise PlaneTimeout("slow")


LOST = WorkerError("Worker actor failed in update: RuntimeError: Connection closed by peer [10.0.0.7]:34567.")


def failed_elsewhere(raised, ended, *, notice_s=60.0, hung=None):
    """The error of a run with ranks on two other hosts, of which the second ends with `ended`."""

    async def body():
        loop = asyncio.get_running_loop()
        ends = {f"Worker actor-{rank} on gpu-{rank}": loop.create_future() for rank in (1, 2)}
        async with named_remote_losses(ends, hung or HungProcesses(), notice_s=notice_s):
            if ended is not None:  # Ray notices it after the other ranks have failed
                loop.call_later(0.01, ends["Worker actor-2 on gpu-2"].set_exception, ended)
            raise raised

    with pytest.raises(RLError) as caught:
        asyncio.run(body())
    return caught.value


def test_a_rank_of_another_host_is_named_once_ray_has_lost_it():
    reason = "The actor died unexpectedly before finishing this task.\n\tpid: 7\nIts node has died."
    error = failed_elsewhere(LOST, RuntimeError(reason))
    assert type(error) is WorkerDiedError
    assert str(error) == (
        "Worker actor-2 on gpu-2 has ended (The actor died unexpectedly before finishing this task. Its node has died.). "
        f"Because of that: {LOST}"
    )


def test_those_that_ended_are_listed_whichever_host_they_are_on(child):
    child.kill()
    until(child.pid, KILLED)

    async def body():
        lost, lives = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
        lost.set_exception(RuntimeError("Its node has died."))
        here = {child.pid: "Worker actor", os.getpid(): "Worker critic"}
        return ended(here, {"Worker actor-2 on gpu-2": lost, "Worker actor-3 on gpu-3": lives})

    assert asyncio.run(body()) == [
        f"Worker actor (process {child.pid}) {KILLED}",
        "Worker actor-2 on gpu-2 has ended (Its node has died.)",
    ]


def test_a_rank_of_another_host_that_was_killed_since_it_hung_is_named_so():
    hung, host = HungProcesses(), OtherHost(name="gpu-2", memory="m2", node="n2", address="10.0.0.2")
    hung.add(Watched("Worker actor-2 on gpu-2", 41, Path("/proc/41/fd/7"), host), 60.0)
    error = failed_elsewhere(LOST, RuntimeError("Its process was killed."), hung=hung)
    assert str(error) == (
        f"Worker actor-2 on gpu-2 hung for 60 s (restart.heartbeat_s) and was therefore killed. Because of that: {LOST}"
    )


def test_an_error_of_ranks_that_all_run_is_unchanged():
    late = HangError("The driver has waited for 60 s.")
    assert failed_elsewhere(late, None) is late  # without a wait: there was one before
    assert failed_elsewhere(LOST, None, notice_s=0.05) is LOST
    for error in (ConfigError("wrong."), WorkerDiedError("Worker actor-1 died.")):
        assert failed_elsewhere(error, None) is error  # without a wait


def test_an_answer_is_given_up_when_the_process_behind_it_ends(child):
    """A raylet that ends while a new worker waits for it: Ray never says that it will not start."""
    processes = {child.pid: "The raylet", os.getpid(): "This one"}

    async def work():
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, child.kill)
        async with asyncio.timeout(60):
            with pytest.raises(
                WorkerDiedError, match=rf"^It can't start: The raylet \(process {child.pid}\) {KILLED}\.$"
            ):
                await unless_ended(answer, lambda: ended(processes), "It can't start")
        assert answer.cancelled()

    asyncio.run(work())


def test_an_answer_of_a_process_that_is_stopped_for_a_while_is_waited_for(child):
    child.send_signal(signal.SIGSTOP)
    until(child.pid, "is stopped")

    async def work():
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.5, answer.set_result, 5)
        return await unless_ended(answer, lambda: ended({child.pid: "The raylet"}), "It can't start")

    assert asyncio.run(work()) == 5


def test_work_ends_with_a_process_that_it_can_not_do_without(child):
    cleaned = []

    async def work():
        async with ended_with({child.pid: "The GCS server of Ray", os.getpid(): "This one"}):
            child.kill()
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 60)
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

    with pytest.raises(WorkerDiedError, match=rf"^The GCS server of Ray \(process {child.pid}\) {KILLED}\.$"):
        asyncio.run(work())
    assert cleaned == [True]


@pytest.mark.parametrize("error", [RLError("no"), asyncio.CancelledError(), ValueError("no")])
def test_other_ends_of_such_work_stay_what_they_are(child, error):
    async def work():
        async with ended_with({child.pid: "The GCS server of Ray"}):
            raise error

    async def main():
        with pytest.raises(type(error)) as raised:
            await work()
        assert raised.value is error
        async with ended_with({child.pid: "The GCS server of Ray"}):
            pass
        assert await asyncio.wait_for(asyncio.sleep(0, "goes on"), 60) == "goes on"

    asyncio.run(main())
