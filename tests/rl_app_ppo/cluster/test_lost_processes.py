"""If a run fails because a process is gone, the error names the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rl_app_ppo.cluster.lost_processes import fate, named_losses, named_remote_losses, unless_ended
from rl_protocol import ConfigError, PlaneTimeout, RLError, WorkerDiedError, WorkerError
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
        named_losses({child.pid: "The controller", os.getpid(): "This one"}),
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


def test_one_that_ended_is_named_with_its_code(child):
    child.stdin.close()
    child.stdin = None
    failed(child, "ended with code 3" if uses_linux() else "has ended")


def test_other_errors_stay_what_they_are(child):
    with pytest.raises(PlaneTimeout, match=r"^slow$"), named_losses({child.pid: "The controller"}):
        raise PlaneTimeout("slow")
    child.kill()
    until(child.pid, KILLED)
    with pytest.raises(ConfigError, match=r"^a setting$"), named_losses({child.pid: "The controller"}):
        raise ConfigError("a setting")


LOST = WorkerError("Worker actor failed in update: RuntimeError: Connection closed by peer [10.0.0.7]:34567.")


def failed_elsewhere(raised, ended, *, notice_s=60.0):
    """The error of a run with ranks on two other hosts, of which the second ends with `ended`."""

    async def body():
        loop = asyncio.get_running_loop()
        ends = {f"Worker actor-{rank} on gpu-{rank}": loop.create_future() for rank in (1, 2)}
        async with named_remote_losses(ends, notice_s=notice_s):
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


def test_an_error_of_ranks_that_all_run_is_unchanged():
    assert failed_elsewhere(LOST, None, notice_s=0.05) is LOST
    for error in (ConfigError("wrong."), WorkerDiedError("Worker actor-1 died.")):
        assert failed_elsewhere(error, None) is error  # without a wait


def test_an_answer_is_given_up_when_the_process_behind_it_ends(child):
    """A raylet that ends while a new worker waits for it: Ray never says that it will not start."""

    async def work():
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, child.kill)
        async with asyncio.timeout(60):
            with pytest.raises(
                WorkerDiedError, match=rf"^It can't start: The raylet \(process {child.pid}\) {KILLED}\.$"
            ):
                await unless_ended(answer, {child.pid: "The raylet", os.getpid(): "This one"}, "It can't start")
        assert answer.cancelled()

    asyncio.run(work())


def test_an_answer_of_a_process_that_is_stopped_for_a_while_is_waited_for(child):
    child.send_signal(signal.SIGSTOP)
    until(child.pid, "is stopped")

    async def work():
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.5, answer.set_result, 5)
        return await unless_ended(answer, {child.pid: "The raylet"}, "It can't start")

    assert asyncio.run(work()) == 5
