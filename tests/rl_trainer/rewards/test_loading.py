"""Where reward functions may be loaded from."""

from __future__ import annotations

import asyncio
import sys

import pytest
from reward_samples import samples, scores, write

from rl_protocol import ConfigError
from rl_trainer.rewards import (
    ScorerPool,
    check_reward,
    load_reward,
)

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


@pytest.mark.parametrize("code", ["score = 3", "score: int = 3", "def score(): ...\nscore = 3"])
def test_a_number_in_place_of_a_function_is_refused_before_the_file_runs(tmp_path, code):
    name = f"{write(tmp_path, code)}:score"
    with pytest.raises(ConfigError, match=r"load_reward\.name='.*mine\.py:score' must be callable; got int"):
        check_reward(name)


@pytest.mark.parametrize("code", ["score = print", "score = 3\nscore = print", "if True:\n    score = 3"])
def test_what_only_running_the_file_tells_is_left_to_it(tmp_path, code):
    check_reward(f"{write(tmp_path, code)}:score")


def test_a_file_loads_only_as_the_user_has_allowed_it(tmp_path):
    name = f"{write(tmp_path, FORMS)}:score"
    for use in (check_reward, load_reward):
        with pytest.raises(
            ConfigError, match=rf"load_reward\.name='{tmp_path}/mine\.py'.* add --trust {tmp_path}/mine"
        ):
            use(name, {})
        use(name)
    (tmp_path / "mine.py").write_text("score = print")
    for use in (check_reward, load_reward):
        with pytest.raises(ConfigError, match=r"has sha256 \w{64} on this host; trusted is"):
            use(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py:score", "does not exist"),
        ("mine.txt:score", "is not a Python file"),
        ("exact_mach", r"known are .*exact_match, .*math.*Did you mean 'exact_match'\?"),
    ],
)
def test_a_function_that_is_not_there(name, message):
    with pytest.raises(ConfigError, match=message):
        check_reward(name)


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        ("import nothing_like_it", "score", "can't be loaded: ModuleNotFoundError"),
        ("x = 1", "score", "defines no 'score'"),
        ("score = 3", "score", r"load_reward\.name='.*mine\.py:score' must be callable; got int"),
        (
            "async def score(data_sources, solution_strs, ground_truths, extra_infos): ...",
            "score",
            r"mine\.py:1 is async and takes a batch of responses\. An async function scores one",
        ),
        ("raise SystemExit(3)\nscore = 1", "score", "can't be loaded: SystemExit: 3"),
        ("import os\nos._exit(3)\nscore = 1", "score", "did not start"),
    ],
)
def test_a_file_that_can_not_be_loaded_ends_the_run_before_it_begins(tmp_path, code, function, message):
    path = write(tmp_path, code)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(ScorerPool.open(f"{path}:{function}", workers=1, timeout_s=60, memory_mb=2048))


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ("response", "too many positional arguments"),
        ("a, b, c", "too many positional arguments"),
        ("a, b, c, *, extra_info=None", "too many positional arguments"),
        ("a, b, c, d, e", "missing a required argument: 'e'"),
        ("a, /, b, c, d, e, f=None", "missing a required argument: 'e'"),
        ("a, b, c, d=None, *, weight", "missing a required argument: 'weight'"),
        ("*all, weight, **more", "missing a required argument: 'weight'"),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_that_takes_other_arguments_is_refused_before_it_runs(tmp_path, parameters, why, keyword):
    file = write(tmp_path, f"raise RuntimeError\n{keyword} score({parameters}): ...\n")
    with pytest.raises(ConfigError, match=rf"mine\.py:2 is called with 4 positional arguments, which fails: {why}\."):
        check_reward(f"{file}:score")


@pytest.mark.parametrize(
    ("parameters", "given", "place", "name"),
    [
        ("solution_str, ground_truth, data_source=None, extra_info=None", "data_source", 1, "solution_str"),
        ("solution_str, ground_truth, method='strict', weight=1.0", "data_source", 1, "solution_str"),
        ("source, solution_str, extra_info, ground_truth", "data_source", 3, "extra_info"),
        ("solution_strs, ground_truths, data_sources, extra_infos", "data_sources", 1, "solution_strs"),
    ],
)
def test_a_function_with_its_arguments_in_another_order_is_refused(tmp_path, parameters, given, place, name):
    file = write(tmp_path, f"def score({parameters}): ...\n")
    message = rf"mine\.py:1 is called with \({given}, .*\), in this order, but its parameter {place} is '{name}'"
    for use in (check_reward, load_reward):
        with pytest.raises(ConfigError, match=message):
            use(f"{file}:score")


@pytest.mark.parametrize(
    "code",
    [
        "score = lambda a, b: 1.0",
        "from functools import cache\n@cache\ndef score(a, b): ...",
        "class Scorer:\n    def __call__(self, a): ...\nscore = Scorer()",
    ],
)
def test_a_function_whose_parameters_only_running_tells_is_refused_when_it_is_loaded(tmp_path, code):
    name = f"{write(tmp_path, code)}:score"
    check_reward(name)
    with pytest.raises(ConfigError, match=r"is called with 4 positional arguments, which fails: too many .* Give it"):
        load_reward(name)


def test_an_error_that_only_the_compiler_finds_is_named_by_its_line(tmp_path):
    with pytest.raises(ConfigError, match=r"mine\.py, line 2: duplicate argument 'a' in function definition\. Fix"):
        check_reward(f"{write(tmp_path, 'import os' + chr(10) + 'def score(a, a, b, c): ...')}:score")


@pytest.mark.parametrize(
    "code",
    [
        "def score(a, b, c, d): ...",
        "def score(a, b, c, d=None, e=None, **more): ...",
        "def score(data_source, solution_str, ground_truth, extra_info=None, method='strict'): ...",
        "def score(data_sources, solution_strs, ground_truths, extra_infos): ...",
        "def score(source, solution_str, answer, extra_info): ...",
        "def score(a, *rest): ...",
        "def score(a, /, b, c, d=None): ...",
        "def score(*all, weight=1.0): ...",
        "def score(a): ...\ndef score(a, b, c, d): ...",
        "@wraps\ndef score(a): ...",
        "class score: ...",
        "score = make(3)",
        "from rl_trainer.rewards.math import score",
    ],
)
def test_a_function_that_may_take_four_arguments_is_not_refused(tmp_path, code):
    check_reward(f"{write(tmp_path, code)}:score")


def test_an_installed_package_offers_a_function_by_name_where_it_is_allowed(install_plugins):
    install_plugins("rl_trainer.rewards", other="rl_trainer.rewards.functions:exact_match")
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
    install_plugins("rl_trainer.rewards", other="rl_trainer.rewards.functions:exact_match")
    with pytest.raises(ConfigError, match=r"'other' is the name of several: .* Uninstall all but one, or rename"):
        load_reward("other")


def test_a_package_that_offers_the_name_of_a_built_in_function_is_named(install_plugins):
    """It is refused as for estimators and losses; the built-in one would run in its place."""
    install_plugins("rl_trainer.rewards", gsm8k="their_reward:it")
    for use in (check_reward, load_reward):
        with pytest.raises(ConfigError, match=r"'gsm8k' is the name of several: .*gsm8k:score, their_reward:it\."):
            use("gsm8k")
    by_data_source = load_reward("by_data_source")
    assert by_data_source("openai/gsm8k", "#### 4", "4")["score"] == 1.0


def test_a_process_of_its_own_checks_what_may_load_as_well(install_plugins, monkeypatch):
    """The process receives a name and finds the operator's file through its environment."""
    site = install_plugins("rl_trainer.rewards", lengths="installed_reward:lengths")
    (site / "installed_reward.py").write_text(
        "def lengths(d, solution_str, g, extra_info=None): return len(solution_str)"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))

    async def run():
        pool = await ScorerPool.open("lengths", workers=1, timeout_s=60, memory_mb=2048)
        try:
            return await pool.score(samples("abc"))
        finally:
            await pool.close()

    assert scores(asyncio.run(run())) == [3.0]
    monkeypatch.delenv("RL_PLUGINS")
    with pytest.raises(ConfigError, match="installed but not allowed"):
        asyncio.run(run())
