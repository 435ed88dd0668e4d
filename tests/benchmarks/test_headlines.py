"""harness/headlines.py: the ratios that the scheduled workflow holds against the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.headlines import HEADLINES, Headline, gather
from harness.results import ROOT, published_results

ASKED = (Headline(("a.py",), ("first", "third")), Headline(("b.py",), ("second",)))


def write(path: Path, **values: float) -> Path:
    rows: list[dict[str, Any]] = [
        {"question": question, "value": value, "must": ">= 1", "aim": ">= 2", "met": "aim"}
        for question, value in values.items()
    ]
    document = {
        "benchmark": path.stem,
        "command": ["x"],
        "commit": "0123abcd",
        "hardware": {"cpu": "c", "cores": 2, "memory_gib": 24, "gpu": None},
        "versions": {"python": "3.11"},
        "load_average": [0.0],
        "rows": rows,
    }
    path.write_text(json.dumps(document))
    return path


def test_ratios_are_gathered_in_the_order_of_the_headlines(tmp_path: Path):
    one = write(tmp_path / "one.json", third=3.0, first=1.0, other=9.0)
    two = write(tmp_path / "two.json", second=2.0)
    rows = gather([one, two], ASKED)
    assert [(row["question"], row["value"]) for row in rows] == [("first", 1.0), ("third", 3.0), ("second", 2.0)]


def test_a_ratio_that_no_result_holds_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"answers 'second'; read one.json"):
        gather([write(tmp_path / "one.json", third=3.0, first=1.0)], ASKED)


def test_there_are_ten_headlines_of_scripts_that_exist():
    questions = [question for headline in HEADLINES for question in headline.questions]
    assert len(questions) == len(set(questions)) == 10
    assert all((ROOT / "benchmarks" / headline.command[0]).is_file() for headline in HEADLINES)


def test_every_headline_is_answered_by_a_published_result():
    assert len(gather(published_results())) == 10
