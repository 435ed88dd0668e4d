"""tests/PITFALLS.md names existing tests; no source file exits or sets up logging."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
ROWS = re.findall(r"^\| ([PA]\d+) \| (.+) \| (`.+`) \|$", (TESTS / "PITFALLS.md").read_text(), re.MULTILINE)
SOURCES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")])


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def suite_classes() -> dict[str, list[str]]:
    """Test classes and the names of their bases."""
    out: dict[str, list[str]] = {}
    for path in [*TESTS.rglob("*.py"), *ROOT.glob("packages/*/src/*/testing/*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                own = [f.name for f in node.body if isinstance(f, ast.FunctionDef)]
                out[node.name] = [*own, *(base.id for base in node.bases if isinstance(base, ast.Name))]
    return out


def inherited(name: str, classes: dict[str, list[str]]) -> Iterator[str]:
    for entry in classes.get(name, ()):
        yield entry
        yield from inherited(entry, classes)


def test_every_pitfall_has_its_line() -> None:
    numbers, asynchronous = ([int(name[1:]) for name, _, _ in ROWS if name[0] == table] for table in "PA")
    for found in (numbers, asynchronous):
        assert found == sorted(set(found))
    assert {*range(1, 37), *range(64, 74)} <= set(numbers)
    assert {*range(1, 4), *range(5, 21)} <= set(asynchronous)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_pitfall_exist(row: tuple[str, str, str]) -> None:
    classes = suite_classes()
    for place, test in (name.split("::") for name in re.findall(r"`([^`]+)`", row[2])):
        found = functions(TESTS / place) if place.endswith(".py") else set(inherited(place, classes))
        assert test in found, f"{place}::{test}"


def test_nothing_ends_a_process_by_force() -> None:
    assert SOURCES
    for path in SOURCES:
        assert "os._exit" not in path.read_text(), path


def test_only_entry_points_set_logging_up() -> None:
    setting_up = {path.name for path in SOURCES if re.search(r"basicConfig|dictConfig|getLogger\(\)", path.read_text())}
    assert setting_up <= {
        "attempts.py",
        "process.py",
        "server_process.py",
        "plane_driver.py",
    }  # a run of the app, a worker process of it, a process of a plane, the driver of a run of `rl chaos`


RUNNERS = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "marshal.loads",
)


COMPARED = {("function_source.py", "compile")}
"""A reward function's own source is compiled to compare it with the function, and is not run."""


def called(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_nothing_that_was_generated_or_received_is_run_as_code() -> None:
    """No source file evaluates text: a tool call or an answer of a model is data, not code."""
    for path in SOURCES:
        for call in called(path):
            name = ast.unparse(call.func)
            assert name not in RUNNERS or (path.name, name) in COMPARED, f"{path}:{call.lineno}: {name}"
            shell = [word for word in call.keywords if word.arg == "shell"]
            assert not shell, f"{path}:{call.lineno}: shell="


WAITS = {"wait", "wait_for"}
LIMITS = {"deadline", "timeout", "timeout_at"}


def unbounded_waits(node: ast.AST, *, limited: bool = False) -> Iterator[int]:
    """Lines of waits for events, conditions and tasks that no deadline ends."""
    if isinstance(node, ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        limited = limited or any(ast.unparse(call.func).rpartition(".")[2] in LIMITS for call in calls)
    if isinstance(node, ast.Await) and isinstance(call := node.value, ast.Call) and not limited:
        waits = ast.unparse(call.func).rpartition(".")[2] in WAITS
        if waits and not any(word.arg in ("timeout", "timeout_s") for word in call.keywords):
            yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unbounded_waits(child, limited=limited)


def test_the_search_for_unbounded_waits_finds_them() -> None:
    source = "async def f():\n await e.wait()\n async with timeout(1):\n  await e.wait()\n await wait([t], timeout=1)\n"
    assert list(unbounded_waits(ast.parse(source))) == [2]


def test_every_wait_of_the_driver_has_a_deadline() -> None:
    found = [
        f"{path.name}:{line}: {path.read_text().splitlines()[line - 1].strip()}"
        for folder in ("packages/rl-trainer/src/rl_trainer/driver", "apps/ppo/src/rl_app_ppo/driver")
        for path in sorted((ROOT / folder).glob("*.py"))
        for line in unbounded_waits(ast.parse(path.read_text()))
    ]
    assert found == []


def test_no_deadline_hangs_on_a_signal() -> None:
    """No source file uses signal.alarm, which only works in a process's main thread."""
    for path in SOURCES:
        names = {ast.unparse(call.func) for call in called(path)}
        assert not names & {"signal.alarm", "signal.setitimer"}, path
