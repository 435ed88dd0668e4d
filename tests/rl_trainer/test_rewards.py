"""Reward functions of others: forms, sums, where they may come from, and what happens when they misbehave."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.rewards import (
    CombinedScorer,
    Failure,
    InlineScorer,
    Sample,
    Scored,
    ScorerPool,
    Term,
    check_reward,
    load_reward,
    parse_terms,
)
from rl_trainer.rewards.functions import run
from rl_trainer.rewards.outcomes import outcome_of
from rl_trainer.rewards.pool import LATE_S, MOST_LATE, Turns


def samples(*texts, truth="t"):
    return [Sample(data_source="s", solution_str=text, ground_truth=truth, extra_info={"k": 1}) for text in texts]


def write(folder, code):
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(code))
    return path


async def pooled(path, texts, *, function="score", workers=2, timeout_s=2.0, memory_mb=2048, truth="t"):
    pool = await ScorerPool.open(f"{path}:{function}", workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)
    try:
        return await pool.score(samples(*texts, truth=truth))
    finally:
        await pool.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_REWARD_PATH", str(tmp_path))
    return tmp_path


def scores(outcomes):
    return [one.numbers["score"] if isinstance(one, Scored) else one.kind for one in outcomes]


# -- what a function may return
def test_a_number_or_a_mapping_is_a_score():
    assert outcome_of(True) == Scored(numbers={"acc": 1.0, "score": 1.0})
    assert outcome_of({"score": 0.5, "acc": 1, "pred": "7"}) == Scored(
        numbers={"acc": 1.0, "score": 0.5}, texts={"pred": "7"}
    )


@pytest.mark.parametrize(
    "returned",
    [None, "1", float("nan"), float("inf"), [1.0], {"acc": 1.0}, {"score": "1"}, {"score": 1, "x": None}, {}],
)
def test_anything_else_is_a_failure_that_says_what_it_was(returned):
    outcome = outcome_of(returned)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "no_number"
    assert "returned" in outcome.message


# -- forms
FORMS = """
import asyncio, os
def score(data_source, solution_str, ground_truth, extra_info=None):
    print("to stderr, not into the answers")
    return {"score": float(solution_str == ground_truth), "pid": os.getpid(), "k": extra_info["k"]}
async def waits(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(float(solution_str))
    return float(solution_str)
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "raise" in solution_strs:
        raise ValueError("one spoils all")
    return [float(len(s)) for s in solution_strs] if "drop" not in solution_strs else [1.0]
class Scorer:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 3.0
instance = Scorer()
"""


def test_a_single_function_runs_in_other_processes(folder):
    outcomes = asyncio.run(pooled(write(folder, FORMS), ["t", "u", "t", "t"]))
    assert scores(outcomes) == [1.0, 0.0, 1.0, 1.0]
    assert os.getpid() not in {one.numbers["pid"] for one in outcomes}
    assert {one.numbers["k"] for one in outcomes} == {1.0}


def test_async_calls_wait_side_by_side_and_one_that_is_late_fails_alone(folder):
    texts = ["0.3"] * 20 + ["30", "0.1"]
    start = time.monotonic()
    outcomes = asyncio.run(pooled(write(folder, FORMS), texts, function="waits"))
    assert scores(outcomes) == [0.3] * 20 + ["timeout", 0.1]
    assert time.monotonic() - start < 20 * 0.3 + 2 + 5  # in a row, the others would take that long alone
    assert scores(asyncio.run(pooled(write(folder, FORMS), ["x"], function="instance"))) == [3.0]


@pytest.mark.parametrize("spoiler", ["raise", "drop"])
def test_a_batch_that_fails_is_tried_again_one_by_one(folder, spoiler):
    outcomes = asyncio.run(pooled(write(folder, FORMS), ["a", "bb", spoiler, "cccc"], function="batch", workers=1))
    assert scores(outcomes) == [1.0, 2.0, "exception" if spoiler == "raise" else 1.0, 4.0]


# -- what misbehaves
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


def test_a_call_that_never_returns_is_ended_in_time(folder):
    start = time.monotonic()
    outcomes = asyncio.run(pooled(write(folder, HOSTILE), ["fine", "loop", "fine"], timeout_s=0.5))
    assert scores(outcomes) == [1.0, "timeout", 1.0]
    assert time.monotonic() - start < 30
    _no_process_of(folder, set())


def test_a_call_that_never_returns_holds_up_no_other(folder):
    """With one worker: it goes on beside the next one, and has its limit."""
    path = write(folder, HOSTILE)

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
    _no_process_of(folder, set())


PATIENT = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
def score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "hang" and not (HERE / "released").exists():
        time.sleep(0.01)
    (HERE / f"scored-{solution_str}").touch()
    return 1.0
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
def test_a_batch_goes_on_beside_a_call_that_hangs_and_ends_with_it(folder, function):
    """With one worker, and the one that hangs first: all others are scored before it returns, then the batch is whole."""
    path, fine = write(folder, PATIENT), [str(i) for i in range(20)]

    async def run():
        scoring = asyncio.create_task(
            pooled(path, ["hang", *fine], function=function, workers=1, timeout_s=200, memory_mb=2048)
        )
        await asyncio.to_thread(appear, *(folder / f"scored-{text}" for text in fine))
        assert not scoring.done()
        assert not (folder / "scored-hang").exists()
        (folder / "released").touch()
        return await asyncio.wait_for(scoring, 60)

    assert scores(asyncio.run(run())) == [1.0] * 21
    _no_process_of(folder, set())


def test_a_late_call_that_returns_has_its_score_and_no_more_processes_stay_than_workers(folder):
    path = write(
        folder,
        """
        import os, time
        def score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(float(solution_str))
            return {"score": 0.5, "pid": os.getpid()}
        """,
    )

    async def run():
        pool = await ScorerPool.open(f"{path}:score", workers=1, timeout_s=60, memory_mb=2048)
        try:
            first = await pool.score(samples("1.5", "0", "0"))
            return first, [await pool.score(samples("0")) for _ in range(3)]
        finally:
            await pool.close()

    first, later = asyncio.run(run())
    assert scores(first) == [0.5] * 3
    assert first[0].numbers["pid"] != first[1].numbers["pid"]
    assert len({outcome.numbers["pid"] for (outcome,) in later}) == 1
    _no_process_of(folder, set())


def test_turns_are_given_up_within_bounds_and_what_is_late_follows_from_what_is_usual():
    async def run():
        turns, held = Turns(1), []
        assert turns.late_after() == LATE_S
        async with AsyncExitStack() as stack:
            for _ in range(MOST_LATE):
                held.append(await asyncio.wait_for(stack.enter_async_context(turns.take()), 60))
                assert turns.give_up(held[-1])
            last = await asyncio.wait_for(stack.enter_async_context(turns.take()), 60)
            assert not turns.give_up(last), "there are enough"
            next_one = asyncio.create_task(stack.enter_async_context(turns.take()))
            await asyncio.sleep(0)
            assert not next_one.done()
            next_one.cancel()
        assert turns.give_up(await turns.take().__aenter__()), "they have ended, and there is room again"
        for seconds in (0.2, 0.6):
            turns.returned(seconds)
        return turns.late_after()

    assert asyncio.run(run()) == pytest.approx(4.0)


@pytest.mark.slow
def test_each_kind_of_misbehaviour_is_the_failure_of_its_sample_and_of_no_other(folder):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    texts = [text for bad in EXPECTED for text in (bad, "fine")]
    outcomes = asyncio.run(pooled(write(folder, HOSTILE), texts, timeout_s=1.0))
    assert scores(outcomes) == [one for expected in EXPECTED.values() for one in (expected, 1.0)]
    messages = {text: one.message for text, one in zip(texts, outcomes, strict=True) if isinstance(one, Failure)}
    assert messages["raise"] == "raised ValueError: not today"
    assert messages["memory"].startswith("raised MemoryError")
    assert messages["loop"] == "did not return within 1 s (reward.timeout_s)"
    _no_process_of(folder, before)


def _no_process_of(folder, before):
    """Neither children nor what they forked, which no longer is our child."""
    deadline, left = time.monotonic() + 10, []
    while time.monotonic() < deadline:
        left = [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in w for w in p.info["cmdline"] or ())]
        if not [p for p in left if p.status() != psutil.STATUS_ZOMBIE and p.pid != os.getpid()]:
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {left}, before there were {before}")


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(folder):
    """Killed as hard as can be while a reward function loops for ever."""
    path = write(folder, HOSTILE)
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
    _no_process_of(folder, set())


# -- where functions come from
def test_a_file_loads_only_from_a_folder_that_the_operator_names(tmp_path):
    path, other = write(tmp_path, FORMS), tmp_path / "other"
    name = f"{path}:score"
    with pytest.raises(ConfigError, match=rf"files of rewards load only from .* set RL_REWARD_PATH={tmp_path}"):
        check_reward(name, {})
    with pytest.raises(ConfigError, match="load only from"):
        check_reward(name, {"RL_REWARD_PATH": str(other)})
    check_reward(name, {"RL_REWARD_PATH": f"{other}{os.pathsep}{tmp_path}"})
    other.mkdir()
    (other / "link.py").symlink_to(path)
    with pytest.raises(ConfigError, match="load only from"):  # what a link points at counts
        check_reward(f"{other}/link.py:score", {"RL_REWARD_PATH": str(other)})
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        check_reward(name, {"RL_REWARD_PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py:score", "is no file that is there"),
        ("mine.txt:score", "is no file that is there"),
        ("exact_mach", r"there are .*exact_match, .*math.*Did you mean 'exact_match'\?"),
    ],
)
def test_a_function_that_is_not_there(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        check_reward(name)


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        ("import nothing_like_it", "score", "can't be loaded: ModuleNotFoundError"),
        ("x = 1", "score", "can't be loaded: AttributeError"),
        ("score = 3", "score", "must be callable; got int"),
        ("raise SystemExit", "score", "did not start"),
    ],
)
def test_a_file_that_can_not_be_loaded_ends_the_run_before_it_begins(folder, code, function, message):
    path = write(folder, code)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(ScorerPool.open(f"{path}:{function}", workers=1, timeout_s=1, memory_mb=2048))


def test_an_installed_package_offers_a_function_by_name_where_it_is_allowed(install_plugins):
    install_plugins("rl_trainer.rewards", other="rl_trainer.rewards.exact:exact_match")
    check_reward("other")
    assert load_reward("other")("s", "a", "a") == {"score": 1.0, "acc": 1.0}
    site = install_plugins("rl_trainer.rewards", allowed=False, sly="sly_reward:it")
    (site / "sly_reward.py").write_text("raise SystemExit('imported')")
    for use in (check_reward, load_reward):
        with pytest.raises(
            ConfigError, match=r"The plug-in 'sly' .* installed but not allowed.*\[rl_trainer\.rewards\.sly\]"
        ):
            use("sly")
    assert "sly_reward" not in sys.modules
    install_plugins("rl_trainer.rewards", other="rl_trainer.rewards.exact:exact_match")
    with pytest.raises(ConfigError, match="offered by several packages"):
        load_reward("other")


def test_a_process_of_its_own_checks_what_may_load_as_well(install_plugins, monkeypatch):
    """It is started with a name, and finds the operator's file by its environment."""
    site = install_plugins("rl_trainer.rewards", lengths="installed_reward:lengths")
    (site / "installed_reward.py").write_text(
        "def lengths(d, solution_str, g, extra_info=None): return len(solution_str)"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))

    async def run():
        pool = await ScorerPool.open("lengths", workers=1, timeout_s=20, memory_mb=2048)
        try:
            return await pool.score(samples("abc"))
        finally:
            await pool.close()

    assert scores(asyncio.run(run())) == [3.0]
    monkeypatch.delenv("RL_PLUGINS")
    with pytest.raises(ConfigError, match="installed but not allowed"):
        asyncio.run(run())


def test_the_built_in_function():
    exact_match = load_reward("exact_match")
    assert exact_match("s", "280", "280") == {"score": 1.0, "acc": 1.0}
    assert exact_match("s", "28", "280") == {"score": 0.0, "acc": 0.0}


# -- sums
def test_the_terms_of_a_sum_are_read():
    assert parse_terms("exact_match") == (Term("exact_match", 1.0),)
    assert parse_terms("0.8*math, -0.2*./brief.py:score") == (Term("math", 0.8), Term("./brief.py:score", -0.2))
    for wrong in ("", "a,a", "x*math", "a,"):
        with pytest.raises(ConfigError, match=r"reward\.function"):
            parse_terms(wrong)


def test_a_sum_keeps_its_parts_and_fails_where_one_fails():
    right = InlineScorer(lambda s, text, truth, extra: {"score": float(text == truth), "pred": text})
    brief = InlineScorer(lambda s, text, truth, extra: {"score": 1 / len(text)} if text else None)
    both = CombinedScorer([Term("right", 2.0), Term("brief", -0.5)], [right, brief])
    good, bad = asyncio.run(both.score(samples("tt", "", truth="tt")))
    assert good.numbers == {
        "score": 2.0 * 1 - 0.5 * 0.5,
        "acc": 1.0,
        "right/score": 1.0,
        "right/acc": 1.0,
        "brief/score": 0.5,
        "brief/acc": 0.5,
    }
    assert good.texts == {"pred": "tt"}
    assert bad == Failure(kind="no_number", message="brief: returned None; it must return a finite number")


# -- mathematics
GSM8K = [
    ("Janet sells 9 eggs. 9 * 2 = 18. #### 18", "18", 1.0),
    ("So the answer is 18.", "He has... #### 18", 1.0),
    ("The total is $1,234.", "1,234", 1.0),
    ("#### 17", "18", 0.0),
    ("I do not know", "18", 0.0),
    ("first #### 18 then #### 19", "18", 0.0),
]
MATH = [
    (r"Thus $x = \boxed{\frac{1}{2}}$.", r"\frac12", 1.0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{(1,2)}", r"(1, 2)", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
    (r"$\frac{1}{3}$, no, \boxed{\frac{1}{4}}", r"\frac13", 0.0),
    (r"the answer is \boxed{3", "3", 0.0),
]


def test_math_scoring_of_gsm8k_and_math_style_rows():
    async def run():
        pool = await ScorerPool.open("math", workers=1, timeout_s=20, memory_mb=4096)
        rows = [Sample(data_source="m", solution_str=text, ground_truth=truth) for text, truth, _ in [*GSM8K, *MATH]]
        try:
            return await pool.score([*rows, Sample(data_source="m", solution_str="1", ground_truth="")])
        finally:
            await pool.close()

    *outcomes, no_truth = asyncio.run(run())
    assert scores(outcomes) == [right for *_, right in [*GSM8K, *MATH]]
    assert outcomes[0].texts["pred"] == "18"
    assert isinstance(no_truth, Failure)
    assert "the ground truth '' can't be read as mathematics" in no_truth.message


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.floats(), st.none(), st.text(max_size=3), st.booleans()), max_size=5))
def test_every_sample_has_an_outcome_in_its_place(returned):
    values = iter(returned)
    scorer = InlineScorer(lambda *_: next(values))
    outcomes = asyncio.run(scorer.score(samples(*map(str, range(len(returned))))))
    for value, outcome in zip(returned, outcomes, strict=True):
        finite = isinstance(value, bool | float) and abs(value) < float("inf")
        assert isinstance(outcome, Scored) == finite
        if finite:
            assert outcome.numbers["score"] == float(value)


def test_a_failure_names_the_innermost_line_of_the_file_of_the_function(tmp_path):
    """What raises may be deep in a library: the user looks for the line of their own."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import json\n"
        "def parse(text):\n"
        "    return json.loads(text)\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return parse(solution_str)['score']\n"
        "async def later(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return parse(solution_str)['score']\n"
        "def no_arguments():\n"
        "    return 1.0\n"
    )
    environment = {"RL_REWARD_PATH": str(tmp_path)}
    samples = [Sample(data_source="s", solution_str=text, ground_truth="") for text in ("{", "{}", '{"score": 1}')]
    for name, line in (("score", 5), ("later", 7)):
        bad, missing, good = run(load_reward(f"{path}:{name}", environment), samples, 10)
        assert (bad.where, missing.where) == (f"{path}:3", f"{path}:{line}")
        assert missing.said == f"raised KeyError: 'score' ({path}:{line})"
        assert good.numbers["score"] == 1.0
    (called,) = run(load_reward(f"{path}:no_arguments", environment), samples[:1], 10)
    assert (called.where, called.said) == ("", called.message)
