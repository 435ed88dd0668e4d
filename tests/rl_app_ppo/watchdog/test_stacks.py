from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from rl_app_ppo.watchdog.stacks import catches_dump, descendants, dumped_stacks, own_stacks, task_stacks

PROGRAM = """
import sys, time
from rl_protocol.support.stack_dumps import dump_at_signal
log = open(sys.argv[1], "a")
dump_at_signal(log)
def reward_that_never_returns():
    print("up", flush=True)
    sum(range(10**12))  # holds the GIL
reward_that_never_returns()
"""


def test_a_process_that_keeps_its_gil_writes_its_stacks(tmp_path):
    log = tmp_path / "reward.log"
    log.write_text("before\n")
    with subprocess.Popen([sys.executable, "-c", PROGRAM, log], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert catches_dump(process.pid)
            stacks = dumped_stacks([process.pid], tmp_path)
        finally:
            process.kill()
    assert list(stacks) == ["reward"]
    assert "reward_that_never_returns" in stacks["reward"]
    assert "before" not in stacks["reward"]


def test_a_process_without_a_handler_is_not_signalled(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        assert dumped_stacks([process.pid], tmp_path) == {}
        assert process.poll() is None
        process.kill()
    assert not catches_dump(process.pid)


def test_children_of_children_are_found():
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert descendants(process.pid) == [child]
        subprocess.run(["kill", str(child)], check=True)


def test_a_task_is_shown_down_to_the_call_it_waits_in():
    async def take_batch():
        await asyncio.Event().wait()

    async def train_step():
        await take_batch()

    async def main():
        task = asyncio.create_task(train_step(), name="training")
        await asyncio.sleep(0)
        found = task_stacks(asyncio.get_running_loop())
        task.cancel()
        return found

    _, _, shown = asyncio.run(main()).partition("task training:")
    assert shown.index("train_step") < shown.index("take_batch") < shown.index("Event.wait")


def test_threads_are_named():
    asked, done = threading.Event(), threading.Event()

    def wait_for_a_lock():
        asked.set()
        done.wait()

    thread = threading.Thread(target=wait_for_a_lock, name="tracker")
    thread.start()
    asked.wait()
    shown = own_stacks()
    done.set()
    thread.join()
    assert "thread tracker:" in shown
    assert "wait_for_a_lock" in shown
