"""Reward functions in worker processes: forms, limits, misbehavior."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from contextlib import AsyncExitStack

import psutil
import pytest
from reward_samples import samples, scores, write

from rl_protocol.support.host.portable import uses_linux
from rl_trainer.rewards import (
    Failure,
    ScorerPool,
)
from rl_trainer.rewards.function_pool import LATE_S, MOST_LATE, Slots


async def pooled(path, texts, *, function="score", workers=2, timeout_s=60.0, memory_mb=2048, truth="t"):
    pool = await ScorerPool.open(f"{path}:{function}", workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)
    try:
        return await pool.score(samples(*texts, truth=truth))
    finally:
        await pool.close()


# -- forms
FORMS = """
import asyncio, os
from pathlib import Path
here = 0
def score(data_source, solution_str, ground_truth, extra_info=None):
    print("to stderr, not into the answers")
    return {"score": float(solution_str == ground_truth), "pid": os.getpid(), "k": extra_info["k"]}
async def waits(data_source, solution_str, ground_truth, extra_info=None):
    # returns once 9 calls have waited together in one process; a late call never does
    global here
    here += 1
    met = Path(__file__).with_name("met")
    if here == 9:
        met.touch()
    while solution_str == "late" or not met.exists():
        await asyncio.sleep(0.01)
    return float(solution_str)
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "raise" in solution_strs:
        raise ValueError("one spoils all")
    return [float(len(s)) for s in solution_strs if s != "drop"]
def first(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(solution_strs[0]))]
class Scorer:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 3.0
instance = Scorer()
"""


def test_a_single_function_runs_in_other_processes(tmp_path):
    outcomes = asyncio.run(pooled(write(tmp_path, FORMS), ["t", "u", "t", "t"]))
    assert scores(outcomes) == [1.0, 0.0, 1.0, 1.0]
    assert os.getpid() not in {one.numbers["pid"] for one in outcomes}
    assert {one.numbers["k"] for one in outcomes} == {1.0}


def test_what_a_function_prints_is_not_lost_when_its_process_is_killed(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    asyncio.run(pooled(write(tmp_path, FORMS), ["t"] * 3))
    assert capfd.readouterr().err == "to stderr, not into the answers\n" * 3


def test_async_calls_wait_side_by_side_and_one_that_is_late_fails_alone(tmp_path):
    texts = ["0.3"] * 20 + ["late", "0.1"]
    outcomes = asyncio.run(pooled(write(tmp_path, FORMS), texts, function="waits", timeout_s=5.0))
    assert scores(outcomes) == [0.3] * 20 + ["timeout", 0.1]
    assert scores(asyncio.run(pooled(write(tmp_path, FORMS), ["x"], function="instance"))) == [3.0]


@pytest.mark.parametrize("spoiler", ["raise", "drop"])
def test_a_batch_that_fails_is_tried_again_one_by_one(tmp_path, spoiler):
    outcomes = asyncio.run(pooled(write(tmp_path, FORMS), ["a", "bb", spoiler, "cccc"], function="batch", workers=1))
    assert scores(outcomes) == [1.0, 2.0, "exception" if spoiler == "raise" else "no_number", 4.0]


def test_a_batch_function_that_always_returns_one_result_fails(tmp_path):
    """Alone, each response would have that result as its score."""
    outcomes = asyncio.run(pooled(write(tmp_path, FORMS), ["a", "bb"], function="first", workers=1))
    assert [one.message for one in outcomes] == ["returned 1 result for 2 responses"] * 2


# -- misbehavior
HOSTILE = """
import os, sys, time
def score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "loop":
            while True: pass
        case "sleep": time.sleep(100)
        case "fork":
            if os.fork() == 0:
                while True: time.sleep(1)
        case "both":
            os.fork()
        case "memory": return float(len(bytearray(10 * 2**30)))
        case "raise": raise ValueError("not today")
        case "exit": sys.exit(0)
        case "kill": os.kill(os.getpid(), 9)
        case "none": return None
        case "nan": return float("nan")
        case "text": return "1.0"
        case "deep":
            def f(): return f()
            return f()
        case "close": os.closerange(0, 50)
        case "spoil":
            for fd in range(3, 20):
                try: os.write(fd, b"\\xff" * 64)
                except OSError: pass
    return 1.0
"""


EXPECTED = {
    "loop": "timeout",
    "sleep": "timeout",
    "fork": 1.0,
    "both": 1.0,
    "memory": "exception",
    "raise": "exception",
    "exit": "died",
    "kill": "died",
    "none": "no_number",
    "nan": "no_number",
    "text": "no_number",
    "deep": "exception",
    "close": "died",
    "spoil": "died",
}


def test_a_call_that_never_returns_is_ended_in_time(tmp_path):
    scoring = pooled(write(tmp_path, HOSTILE), ["loop"], timeout_s=2.0)
    assert scores(asyncio.run(asyncio.wait_for(scoring, 300))) == ["timeout"]
    _no_process_of(tmp_path, set())


def test_a_call_that_never_returns_holds_up_no_other(tmp_path):
    """With one worker, the stuck call runs beside the next one until its own time limit."""
    path = write(tmp_path, HOSTILE)

    async def run():
        pool = await ScorerPool.open(f"{path}:score", workers=1, timeout_s=200, memory_mb=2048)
        stuck = [asyncio.create_task(pool.score(samples("loop"))), asyncio.create_task(pool.score(samples("sleep")))]
        try:
            (fine,) = await asyncio.wait_for(pool.score(samples("fine")), 60)
            assert not any(task.done() for task in stuck)
            return fine
        finally:
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            await pool.close()

    assert asyncio.run(run()).numbers["score"] == 1.0
    _no_process_of(tmp_path, set())


PATIENT = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
def score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "hang" and not (HERE / "released").exists():
        time.sleep(0.01)
    (HERE / f"scored-{solution_str}").touch()
    return {"score": 1.0, "pid": os.getpid()}
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "hang" in solution_strs and len(solution_strs) > 1:
        raise ValueError("not with such a one among them")
    return [score("", text, "") for text in solution_strs]
"""


def appear(*paths):
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("function", ["score", "batch"])
def test_a_batch_continues_beside_a_call_that_hangs_and_ends_with_it(tmp_path, function):
    """With one worker and a first call that hangs, all other samples are scored meanwhile.

    The batch is complete once that call returns.
    """
    path, fine = write(tmp_path, PATIENT), [str(i) for i in range(20)]

    async def run():
        scoring = asyncio.create_task(
            pooled(path, ["hang", *fine], function=function, workers=1, timeout_s=200, memory_mb=2048)
        )
        await asyncio.to_thread(appear, *(tmp_path / f"scored-{text}" for text in fine))
        assert not scoring.done()
        assert not (tmp_path / "scored-hang").exists()
        (tmp_path / "released").touch()
        return await asyncio.wait_for(scoring, 60)

    assert scores(asyncio.run(run())) == [1.0] * 21
    _no_process_of(tmp_path, set())


def test_a_late_call_that_returns_has_its_score_and_no_more_processes_stay_than_workers(tmp_path):
    path = write(tmp_path, PATIENT)

    async def run():
        pool = await ScorerPool.open(f"{path}:score", workers=1, timeout_s=200, memory_mb=2048)
        try:
            scoring = asyncio.create_task(pool.score(samples("hang", "a", "b")))
            await asyncio.to_thread(appear, tmp_path / "scored-a", tmp_path / "scored-b")
            (tmp_path / "released").touch()
            first = await scoring
            pool._slots.record(1e6)  # so long a mean that no later call is late
            return first, [await pool.score(samples("c")) for _ in range(3)]
        finally:
            await pool.close()

    first, later = asyncio.run(run())
    assert scores(first) == [1.0] * 3
    assert first[0].numbers["pid"] != first[1].numbers["pid"]
    assert len({outcome.numbers["pid"] for (outcome,) in later}) == 1
    _no_process_of(tmp_path, set())


def test_late_calls_release_their_slots_within_bounds_and_lateness_follows_the_mean():
    async def run():
        slots, held = Slots(1), []
        assert slots.late_after() == LATE_S
        async with AsyncExitStack() as stack:
            for _ in range(MOST_LATE):
                held.append(await asyncio.wait_for(stack.enter_async_context(slots.acquire()), 60))
                assert slots.release_late(held[-1])
            last = await asyncio.wait_for(stack.enter_async_context(slots.acquire()), 60)
            assert not slots.release_late(last), "there are enough"
            next_one = asyncio.create_task(stack.enter_async_context(slots.acquire()))
            await asyncio.sleep(0)
            assert not next_one.done()
            next_one.cancel()
        assert slots.release_late(await slots.acquire().__aenter__()), "they have ended, so there is room again"
        for seconds in (0.2, 0.6):
            slots.record(seconds)
        return slots.late_after()

    assert asyncio.run(run()) == pytest.approx(4.0)


@pytest.mark.slow
def test_each_kind_of_misbehaviour_is_the_failure_of_its_sample_and_of_no_other(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    bad_ones = [bad for bad in EXPECTED if bad != "memory" or uses_linux()]  # only Linux limits it
    texts = [text for bad in bad_ones for text in (bad, "fine")]
    # long enough for a process that exits on a slow machine; calls that hang wait concurrently
    outcomes = asyncio.run(pooled(write(tmp_path, HOSTILE), texts, timeout_s=15.0))
    assert scores(outcomes) == [one for bad in bad_ones for one in (EXPECTED[bad], 1.0)]
    messages = {text: one.message for text, one in zip(texts, outcomes, strict=True) if isinstance(one, Failure)}
    assert messages["raise"] == "raised ValueError: not today"
    assert messages.get("memory", "raised MemoryError").startswith("raised MemoryError")
    assert messages["loop"] == "did not return within 15 s (ScorerPool.timeout_s)"
    _no_process_of(tmp_path, before)


def _no_process_of(tmp_path, before):
    """Check that no process of the tmp_path is left, including forked ones with another parent."""
    deadline, left = time.monotonic() + 60, []
    while time.monotonic() < deadline:
        left = [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if any(str(tmp_path) in word for word in process.info["cmdline"] or ())
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.pid != os.getpid()
        ]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {left}, before there were {before}")


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    """The parent is killed with SIGKILL while a reward function loops forever."""
    path = write(tmp_path, HOSTILE)
    program = f"""
        import asyncio
        from rl_trainer.rewards import Sample, ScorerPool
        async def main():
            pool = await ScorerPool.open("{path}:score", workers=1, timeout_s=100, memory_mb=2048)
            print("up", flush=True)
            await pool.score([Sample(data_source="s", solution_str="loop", ground_truth="")])
        asyncio.run(main())
    """

    async def run():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(program), stdout=asyncio.subprocess.PIPE
        )
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"up\n"
        process.send_signal(signal.SIGKILL)
        await process.wait()

    asyncio.run(run())
    _no_process_of(tmp_path, set())
