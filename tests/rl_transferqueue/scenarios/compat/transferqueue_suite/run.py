"""Run the tests and tutorials of the TransferQueue 0.1.11 wheel on rl_transferqueue.compat.

    python tests/rl_transferqueue/scenarios/compat/transferqueue_suite/run.py [--record] [NAME ...]

NAME is a part of a file name; without NAME, all files run. The files are unchanged: only the module
name `transfer_queue` is mapped. The outcomes are compared with recorded.json, or written to it with
--record.

`recorded.json` lists the tests that pass and, for every other test, the reason why it does not.
A manually edited reason is kept until the test passes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
WITHOUT_RAY = ("test_metadata.py", "test_samplers.py", "test_streaming_dataset.py")
"""Test files for the public API that need no cluster."""
WITH_RAY = (
    "e2e/test_kv_interface_e2e.py",
    "e2e/test_e2e_lifecycle_consistency.py",
    "e2e/test_checkpoint_e2e.py",
    "e2e/test_ssd_offload_e2e.py",
)
_TUTORIAL_S = 240.0


@contextlib.contextmanager
def unpacked() -> Iterator[Path]:
    """Yield a temporary folder with the wheel's tests and tutorials."""
    distribution = importlib.metadata.distribution("TransferQueue")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in distribution.files or ():
            if file.parts[0] in ("tests", "tutorial") and file.suffix == ".py":
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(distribution.locate_file(file)), target)
        yield folder


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def run_tests(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the outcome of each test: "passed", "skipped" or the first line of the failure.

    A file that can't be imported has one entry.
    """
    outcomes = folder / "outcomes.json"
    plugins = [word for name in ("transfer_queue", "outcomes", "controller") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *plugins, "--continue-on-collection-errors", *files],
        cwd=folder / "tests",
        env=_environment() | {"TQ_OUTCOMES": str(outcomes)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if not outcomes.exists():
        raise RuntimeError(f"pytest ended without outcomes:\n{done.stdout}\n{done.stderr}")
    return json.loads(outcomes.read_text())


def run_tutorial(script: Path) -> str:
    """Return "passed", or "failed" and the end of the script's output."""
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=_TUTORIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: not over within {_TUTORIAL_S:g} s"
    return "passed" if done.returncode == 0 else f"failed: {(done.stdout + done.stderr)[-400:]}"


def differences(found: dict[str, str]) -> list[str]:
    """Return a line for each outcome that differs from the recorded one."""
    recorded: dict[str, str] = json.loads(RECORDED.read_text())
    return [
        f"{name}: {outcome}; recorded: {recorded.get(name)}"
        for name, outcome in found.items()
        if (outcome == "passed") != (recorded.get(name) == "passed") or name not in recorded
    ]


def _reason(outcome: str) -> str:
    """Return a short reason for a failure if there is an obvious one, otherwise the outcome."""
    if "No module named 'transfer_queue." in outcome:
        return f"internals: {outcome.split(chr(39))[1]}"
    if (
        "Regex pattern did not match" in outcome
        or "failed: assert '" in outcome
        or "AssertionError: assert '" in outcome
    ):
        return "message text"
    return outcome


def _record(found: dict[str, str]) -> None:
    before: dict[str, str] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    given = {name: why for name, why in before.items() if not why.startswith(("passed", "failed"))}
    new = {name: "passed" if what == "passed" else given.get(name, _reason(what)) for name, what in found.items()}
    RECORDED.write_text(json.dumps(dict(sorted((before | new).items())), indent=1) + "\n")


def run(names: Sequence[str]) -> dict[str, str]:
    """Run the wheel's files whose names contain one of `names`, and return the outcomes."""
    with unpacked() as folder:
        rest = sorted(path.name for path in (folder / "tests").glob("test_*.py") if path.name not in WITHOUT_RAY)
        scripts = sorted((folder / "tutorial").glob("*.py"))
        files = [file for file in (*WITHOUT_RAY, *rest, *WITH_RAY) if any(name in file for name in names)]
        found = run_tests(folder, files) if files else {}
        for script in scripts:
            if any(name in f"tutorial/{script.name}" for name in names):
                found[f"tutorial/{script.name}"] = run_tutorial(script)
    return found


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--record"]
    outcomes = run(arguments or [""])
    if "--record" in sys.argv:
        _record(outcomes)
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    problems = differences(outcomes)
    sys.stdout.write("\n".join([*problems, f"{passed} of {len(outcomes)} pass; {len(problems)} not as recorded", ""]))
    sys.exit(bool(problems))
