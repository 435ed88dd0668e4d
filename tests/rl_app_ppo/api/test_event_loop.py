"""A coroutine runs from a script, from a thread and inside a running event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait

import pytest
from polling import until_async

from rl_app_ppo.api import event_loop
from rl_app_ppo.api.event_loop import interrupts_deferred, run_interruptibly
from rl_protocol import WorkerDiedError


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def main_thread_waits() -> bool:
    """Whether the main thread waits for the coroutine."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(one.f_code is wait.__code__ for one, _ in traceback.walk_stack(frame))


async def interrupted(cleaned_up: list[str]) -> None:
    """Send Ctrl-C to this process once the coroutine and the main thread wait."""
    while threading.current_thread() is not threading.main_thread() and not main_thread_waits():  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        cleaned_up.append(threading.current_thread().name)
        raise


def run_in_a_notebook(cell: Callable[[], None]) -> None:
    """Call it in a running event loop that does not handle Ctrl-C, as asyncio.run would."""
    raised = Future[None]()

    def call() -> None:
        try:
            raised.set_result(cell())
        except BaseException as error:
            raised.set_exception(error)

    loop = asyncio.new_event_loop()
    loop.call_soon(call)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    raised.result()


def test_it_returns_the_result():
    assert run_interruptibly(double(3)) == 6


def test_it_works_in_another_thread():
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run_interruptibly(double(3))))
    thread.start()
    thread.join(60)
    assert results == [6]


def test_it_works_inside_a_running_event_loop():
    async def cell() -> int:
        return run_interruptibly(double(3))

    assert asyncio.run(cell()) == 6


def test_errors_pass():
    async def fail() -> None:
        raise ValueError("no")

    async def cell() -> None:
        run_interruptibly(fail())

    with pytest.raises(ValueError, match="no"):
        run_interruptibly(fail())
    with pytest.raises(ValueError, match="no"):
        asyncio.run(cell())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_handlers_of_the_process_are_restored(number: signal.Signals):
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(number, mine)
    try:
        run_interruptibly(double(3))
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_ctrl_c_cancels_the_coroutine_and_waits_for_its_clean_up():
    cleaned_up, said = list[str](), list[list[str]]()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(interrupted(cleaned_up), lambda: said.append(list(cleaned_up)))
    assert cleaned_up == [threading.current_thread().name]
    assert said == [[]], "said once, before the clean-up"


@pytest.mark.parametrize(("ignored", "last"), [(False, "cleaned up"), (True, "done")])
def test_a_closed_terminal_ends_the_coroutine_but_not_under_nohup(ignored: bool, last: str):
    program = f"""
import asyncio, os, signal
from rl_app_ppo.api.event_loop import run_interruptibly
signal.signal(signal.SIGHUP, signal.{"SIG_IGN" if ignored else "SIG_DFL"})
async def work():
    os.kill(os.getpid(), signal.SIGHUP)
    try:
        await asyncio.sleep(0.01 if {ignored} else 60)
    except asyncio.CancelledError:
        print("cleaned up")
        raise
    print("done")
try:
    run_interruptibly(work())
except KeyboardInterrupt:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, last), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_after_a_signal_does_not_replace_the_interrupt(number: signal.Signals, caplog):
    """The run would start again after the death of a process."""

    async def died_meanwhile() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            raise WorkerDiedError("Worker actor died during update_actor.")

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(died_meanwhile())
    assert caplog.messages == ["After the interrupt: Worker actor died during update_actor."]


def test_ctrl_c_in_a_notebook_cancels_the_coroutine_and_waits_for_its_clean_up():
    cleaned_up, said = list[str](), list[list[str]]()

    def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(interrupted(cleaned_up), lambda: said.append(list(cleaned_up)))

    run_in_a_notebook(cell)
    assert [name.startswith("rl-app-ppo") for name in cleaned_up] == [True]
    assert said == [[]]


def test_ctrl_c_cancels_the_coroutine_in_a_function_that_asyncio_runs():
    cleaned_up = list[str]()

    async def program() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(interrupted(cleaned_up))

    asyncio.run(program())
    assert len(cleaned_up) == 1


def test_a_second_ctrl_c_in_a_notebook_does_not_interrupt_the_clean_up(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    left, cleaned_up = threading.Event(), list[str]()

    async def arrived() -> bool:
        return "ending already" in caplog.messages or left.is_set()

    async def interrupted_again() -> None:
        try:
            await interrupted([])
        except asyncio.CancelledError:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await until_async(arrived, "the second Ctrl-C arrives")
            cleaned_up.append("done")
            raise

    def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(interrupted_again())
        left.set()
        assert cleaned_up == ["done"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    run_in_a_notebook(cell)


def test_ctrl_c_as_the_coroutine_of_a_notebook_ends_is_no_other_error(monkeypatch: pytest.MonkeyPatch):
    def interrupt_late(futures: tuple[Future[int], ...], timeout: float) -> None:
        wait(futures, 60)
        futures[0].result()  # its loop is closed
        raise KeyboardInterrupt

    monkeypatch.setattr(event_loop, "wait", interrupt_late)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(double(3))

    asyncio.run(cell())


def test_ctrl_c_during_imports_waits_for_their_end():
    done = list[str]()

    def imports() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("imported")

    with pytest.raises(KeyboardInterrupt):
        imports()
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_during_imports_waits_for_their_end():
    arrived = list[str]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append("arrived"))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            assert arrived == []
        assert arrived == ["arrived"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_that_is_ignored_stays_ignored_during_imports():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_imports_in_another_thread_leave_the_handlers_alone():
    found = list[bool]()

    def imports() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=imports)
    thread.start()
    thread.join()
    assert found == [True]
