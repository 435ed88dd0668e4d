"""The tests and tutorials of TransferQueue 0.1.11 on the compatible API.

`transferqueue_suite/run.py` runs them and compares the outcomes with `recorded.json` beside it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest
from transferqueue_suite import run

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None,
    reason="TransferQueue 0.1.11 is not installed: uv sync --group bench",
)


@needs_wheel
def test_tests_of_metadata_samplers_and_streaming_have_their_recorded_outcomes() -> None:
    with run.unpacked() as folder:
        found = run.run_tests(folder, run.WITHOUT_RAY)
    assert run.differences(found) == []
    assert Counter(name.split("::")[0] for name, outcome in found.items() if outcome == "passed") == {
        "test_metadata.py": 35,
        "test_samplers.py": 69,
        "test_streaming_dataset.py": 3,
    }


@needs_wheel
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*run.WITH_RAY, *(f"tutorial/0{number}" for number in range(1, 7))])
def test_tests_with_ray_and_tutorials_have_their_recorded_outcomes(name: str) -> None:
    assert run.differences(run.run([name])) == []


def test_every_test_that_does_not_pass_has_a_reason() -> None:
    recorded: dict[str, str] = json.loads(run.RECORDED.read_text())
    others = {name: why for name, why in recorded.items() if why != "passed"}
    reasons = ("internals: ", "message text", "refused: ", "skipped: ")
    assert [name for name, why in others.items() if not why.startswith(reasons)] == []
    assert {name for name in recorded if name.startswith("tutorial/")} <= recorded.keys() - others.keys()
