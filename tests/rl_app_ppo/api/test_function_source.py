"""A reward function of a script, a notebook or a module runs in another process, or is refused."""

from __future__ import annotations

import inspect
import json
import linecache
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest

from rl_app_ppo.api.function_source import module_source
from rl_protocol import ConfigError

NOTEBOOK = """
import math
import re
from collections import Counter as Count
from typing import Any

NUMBER = re.compile(r"(\\d+)", re.IGNORECASE)
WEIGHTS = {"right": 1.0, "close": [0.5, None]}
table = object()  # as a data frame in a notebook: no other process can have it

def clean(text: Table) -> str:
    table = text.strip()
    return table

strip = clean

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def score(data_source, solution_str, ground_truth, extra_info: Any = None, *, most=WEIGHTS["right"]) -> float:
    found = [strip(one) for one in NUMBER.findall(solution_str)]
    return most * math.floor(Count(found)[ground_truth] + 0.5) + even(len(found)) * 0.0

async def waits(data_source, solution_str, ground_truth, extra_info):
    return score(data_source, solution_str, ground_truth)

def reads_table(data_source, solution_str, ground_truth, extra_info):
    return len(table)

def misspelled(data_source, solution_str, ground_truth, extra_info):
    return scoer(solution_str)

def annotates(data_source, solution_str, ground_truth, extra_info):
    def inner(text: Table) -> float:
        length: Table = len(text)
        return float(length)
    return inner(solution_str)

short = lambda text: text[:3]

def uses_a_lambda(data_source, solution_str, ground_truth, extra_info):
    return short(solution_str)

def make(bonus):
    def made(data_source, solution_str, ground_truth, extra_info):
        return bonus
    return made

closure = make(1.0)
"""


@pytest.fixture
def cell() -> Callable[[str], FunctionType]:
    """A function of a notebook cell: its source is known to linecache alone."""
    name = "<ipython-input-7-cell>"
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = NOTEBOOK.replace("def clean(text: Table)", "def clean(text: 'Table')").replace(
        "inner(text: Table)", "inner(text: 'Table')"
    )
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), namespace)

    def function(name: str) -> FunctionType:
        found = namespace[name]
        assert inspect.isfunction(found)
        return found

    return function


def called(source: str, tmp_path: Path, name: str, *arguments: str) -> object:
    """The result of the function of that module, called in another process and another folder."""
    (tmp_path / "reward_module.py").write_text(source)
    program = (
        "import asyncio, inspect, json, runpy, sys\n"
        "result = runpy.run_path('reward_module.py')[sys.argv[1]](*sys.argv[2:])\n"
        "print(json.dumps(asyncio.run(result) if inspect.iscoroutine(result) else result))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, name, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_function_of_a_notebook_is_copied_with_the_globals_that_it_uses(cell, tmp_path: Path):
    source = module_source(cell("score"))
    assert "table = object" not in source, "only what the function uses is copied"
    assert called(source, tmp_path, "score", "sums", " 12 = 12", "12") == 2.0


def test_an_async_function_is_copied(cell, tmp_path: Path):
    assert called(module_source(cell("waits")), tmp_path, "waits", "sums", "7", "7", "") == 1.0


def test_annotations_need_no_globals(cell, tmp_path: Path):
    assert called(module_source(cell("annotates")), tmp_path, "annotates", "sums", "abc", "", "") == 3.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reads_table", "it uses table, a object of this process"),
        ("misspelled", "it uses scoer, which is not defined"),
        ("uses_a_lambda", "it uses the lambda short"),
        ("short", "it is a lambda"),
        ("closure", "defined within a function"),
    ],
)
def test_what_no_other_process_can_have_is_refused_with_the_remedy(cell, name: str, words: str):
    with pytest.raises(ConfigError, match=words) as raised:
        module_source(cell(name))
    assert "Define it with `def` at the top level of a module" in str(raised.value)


def test_a_function_of_a_module_is_imported_in_the_folder_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine" / "rewards").mkdir(parents=True)
    (tmp_path / "mine" / "rewards" / "__init__.py").touch()
    (tmp_path / "mine" / "rewards" / "near.py").write_text(
        "from .tools import half\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n    return half(1)\n"
    )
    (tmp_path / "mine" / "rewards" / "tools.py").write_text("def half(x): return x / 2\n")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    from rewards.near import score  # pyright: ignore[reportMissingImports]

    source = module_source(score)
    assert "from rewards.near import score as score" in source
    (tmp_path / "elsewhere").mkdir()
    assert called(source, tmp_path / "elsewhere", "score", "", "", "") == 0.5


def test_a_built_in_reward_is_imported():
    from rl_trainer.rewards.functions import exact_match

    assert "from rl_trainer.rewards.functions import exact_match as exact_match" in module_source(exact_match)


def test_a_source_that_has_changed_is_refused(tmp_path: Path):
    file = tmp_path / "script.py"
    file.write_text("def score(a, b, c, d):\n    return 1.0\n")
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), namespace)
    file.write_text("def score(a, b, c, d):\n    return 2.0\n")
    score = namespace["score"]
    assert inspect.isfunction(score)
    with pytest.raises(ConfigError, match="has changed since it was defined"):
        module_source(score)


def test_a_function_without_source_is_refused():
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile("def score(a, b, c, d):\n    return 1.0\n", "<stdin-of-a-test>", "exec"), namespace)
    score = namespace["score"]
    assert inspect.isfunction(score)
    with pytest.raises(ConfigError, match="the source of score can't be read"):
        module_source(score)
