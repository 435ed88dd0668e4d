"""compare.py: a run against its baseline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare import Change, changes
from harness.result_schema import Document

BASE: dict[str, Any] = {
    "benchmark": "b",
    "command": ["x"],
    "commit": "0123abcd",
    "hardware": {"cpu": "c", "cores": 2, "memory_gib": 24, "gpu": None},
    "versions": {"python": "3.11"},
    "load_average": [0.0],
    "rows": [
        {"question": "fast", "value": 10.0, "must": ">= 1", "aim": ">= 2", "met": "aim"},
        {"question": "small", "value": 4.0, "must": "<= 9", "aim": "<= 5", "met": "aim"},
    ],
}


def document(fast: float = 10.0, small: float = 4.0, **more: Any) -> Document:
    rows = [{**BASE["rows"][0], "value": fast}, {**BASE["rows"][1], "value": small}]
    return msgspec.convert({**BASE, "rows": rows, **more}, Document)


def test_worse_is_worse_in_either_direction():
    found = changes(document(), document(fast=8.0, small=5.0))
    assert [(c.what, c.worse_percent) for c in found] == [("fast value", 20.0), ("small value", 25.0)]
    assert [c.worse_percent for c in changes(document(), document(fast=15.0, small=3.0))] == [-50.0, -25.0]


def test_a_baseline_of_zero():
    assert Change("x", 0.0, 0.0, "lower").worse_percent == 0
    assert Change("x", 0.0, 1e-9, "lower").worse_percent == float("inf")
    assert Change("x", 0.0, 1e-9, "higher").worse_percent == -float("inf")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (document(benchmark="other"), "other"),
        (document(rows=BASE["rows"][:1]), r"no row \('small',\)"),
    ],
)
def test_what_can_not_be_compared_is_an_error(run: Document, message: str):
    with pytest.raises(ValueError, match=message):
        changes(document(), run)


def test_exit_codes(tmp_path: Path, script: Callable[..., str]):
    def write(name: str, **more: Any) -> str:
        path = tmp_path / name
        path.write_text(msgspec.json.encode(document(**more)).decode())
        return str(path)

    base = write("base.json")
    assert "0 of 2 numbers" in script("compare.py", base, write("same.json", fast=9.5))
    assert "worse" in script("compare.py", base, write("worse.json", fast=8.0), expect=1)
    script("compare.py", base, write("worse2.json", fast=8.0), "--threshold", "25")
    other = write("other.json", hardware={**BASE["hardware"], "cores": 64})
    script("compare.py", base, other, expect=2)
    script("compare.py", base, other, "--other-hardware")
    (tmp_path / "broken.json").write_text(json.dumps({"rows": []}))
    script("compare.py", base, str(tmp_path / "broken.json"), expect=2)
    script("compare.py", base, str(tmp_path / "missing.json"), expect=2)
    script("compare.py", base, expect=2)
    script("compare.py", base, base, "--headlines", expect=2)
