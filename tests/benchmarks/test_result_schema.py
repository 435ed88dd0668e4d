"""Committed results are whole, and every table comes from them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.result_schema import Document, check, check_place, directions, identity, kind_of, load
from harness.results import RESULTS as FOLDER
from harness.results import published_results
from harness.weight_sync.bars import CPU_OF_ALL, CPU_OF_ONE, DIGESTS, SPEED, VERL, bar_of
from report import (
    FRONT,
    PAGE,
    as_asked,
    cell,
    chaos_matrix,
    chaos_runs,
    headline,
    made,
    measured_later,
    newest_against_trl,
    plain_table,
    tables,
    verdict_table,
)

ROOT = Path(__file__).parents[2]
RESULTS = published_results()
VERDICT = {"question": "q", "value": 3.0, "must": ">= 1", "aim": ">= 2", "met": "aim"}
GOOD: dict[str, Any] = {
    "benchmark": "b",
    "command": ["uv", "run", "x"],
    "commit": "0123abcd",
    "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 24, "gpu": None},
    "versions": {"python": "3.11"},
    "load_average": [0.1, 0.2, 0.3],
    "rows": [VERDICT],
}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_committed_result_is_whole_and_lies_where_it_says(path: Path):
    check_place(path, load(path))


def test_there_are_results():
    assert len(RESULTS) >= 7
    assert {path.parents[2] for path in RESULTS} == {FOLDER}


@pytest.fixture
def unpublished() -> Iterator[Path]:
    """A result file that git does not track."""
    folder = FOLDER / "cpu-2x-some-24gib" / "2026-01-02_0123abcd"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "b.json"
    path.write_text(json.dumps(GOOD))
    yield path
    path.unlink()
    folder.rmdir()
    folder.parent.rmdir()


def test_an_uncommitted_result_changes_no_table(unpublished: Path):
    assert unpublished in set(FOLDER.glob("*/*/*.json"))
    assert unpublished not in published_results()
    assert "2026-01-02_0123abcd" not in tables()


def broken(**changes: Any) -> Document:
    return msgspec.convert({**copy.deepcopy(GOOD), **changes}, Document)


STEP = {
    **dict.fromkeys(("step_s", "stage_p50_ms", "stage_p99_ms", "driver_mib", "driver_cpu_s", "plane_cpu_s", "all_cpu_s"), 1.0),
    **dict.fromkeys(("family", "layout", "mib", "workers", "compute", "compute_s", "plane"), "x"),
}  # fmt: skip


LEARNT = {
    **dict.fromkeys(("algorithm", "overrides"), "x"),
    **dict.fromkeys(("steps", "seconds_per_step", "driver_bytes_per_step_max"), 1.0),
    "final_accuracy": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "empty"),
        ({"command": []}, "command"),
        ({"commit": "0123abcd-dirty"}, "clean working tree"),
        ({"hardware": {"cpu": "x"}}, "hardware"),
        ({"rows": [{"some": 1}]}, "No kind of result"),
        ({"rows": [VERDICT, VERDICT]}, "two rows"),
        ({"rows": [{**VERDICT, "value": float("nan")}]}, "value is nan"),
        ({"rows": [{**VERDICT, "figures": {"a": [1.0, float("inf")]}}]}, r"figures\.a\[1\] is inf"),
        ({"rows": [{**STEP, "step_s": 0.0}]}, "step_s must be a number above zero"),
        ({"rows": [{k: v for k, v in STEP.items() if k != "driver_mib"}]}, "driver_mib must be a number"),
        ({"rows": [{**LEARNT, "final_accuracy": 1.1}]}, "final_accuracy must be a number from 0 to 1"),
    ],
)
def test_what_is_empty_or_broken_is_an_error(changes: dict[str, Any], message: str):
    check(broken())
    check(broken(rows=[LEARNT]))
    with pytest.raises(ValueError, match=message):
        check(broken(**changes))


def test_a_file_that_is_no_result_is_an_error(tmp_path: Path):
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**GOOD, "more": 1}))
    with pytest.raises(ValueError, match=r"b\.json"):
        load(path)


def test_a_result_in_another_place_is_an_error(tmp_path: Path):
    folder = tmp_path / "cpu-2x-some-24gib" / "2026-01-02_0123abcd"
    check_place(folder / "b.json", broken())
    for wrong in (
        folder / "c.json",
        folder.with_name("2026-01-02_99999999") / "b.json",
        folder.with_name("x_0123abcd") / "b.json",
    ):
        with pytest.raises(ValueError, match="lies under"):
            check_place(wrong, broken())


def test_kinds_and_directions():
    assert (kind_of(VERDICT).name, identity(VERDICT), directions(VERDICT)) == ("verdict", ("q",), {"value": "higher"})
    assert directions({**VERDICT, "must": "", "aim": "<= 1"}) == {"value": "lower"}
    assert kind_of(STEP).name == "step"


# -- READMEs
FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:x|times)\s(?:as\s)?(?:faster|slower|less|more)\b|\d[\d.,]*\s?(?:GiB|MiB|GB|MB|Gbit|rows|tokens)/s|\d[\d.,]*\s(?:s|ms|us|µs)\sper\b"
)
"""A measured figure in prose: a factor, a rate, a cost."""


def readme_text(path: Path) -> str:
    """A README without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def test_figures_are_recognised():
    told = [
        "12x faster",
        "3.5 times less CPU",
        "2 GiB/s",
        "some 20 us per block",
        "0.2 s per GiB",
        "1.5 times as slower",
    ]
    assert [bool(FIGURE.search(text)) for text in told] == [True] * len(told)
    assert not FIGURE.search(
        "a deadline of 5 s; 16 MiB and 1/64 of a unit; within 3 seconds; 256 units; about a minute"
    )


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*/README.md"), ROOT / "benchmarks" / "README.md"]),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_no_readme_tells_a_figure_that_has_no_source(path: Path):
    assert FIGURE.findall(readme_text(path)) == [], "link the table of benchmarks/RESULTS.md instead"


def test_the_tables_are_those_that_the_results_give():
    results = {path: load(path) for path in published_results()}
    wanted = [
        (PAGE, "tables", tables()),
        (FRONT, "runs with faults", chaos_matrix(chaos_runs())),
        (FRONT, "steps against TRL", newest_against_trl(results)),
    ]
    for page, name, text in wanted:
        assert made(page, name)[1].strip() == text.strip(), f"{name}; run: uv run benchmarks/report.py"


def test_weight_sync_is_held_against_the_bars_that_were_asked_for():
    def row(question: str, value: float) -> dict[str, Any]:
        return {"question": question, "value": value, "must": ">= 0.1", "aim": ">= 0.3", "met": "aim"}

    (table,) = as_asked([row("shm, 1 receiver: speed against memcpy", 0.44)])
    assert (table["must"], table["aim"], table["met"]) == (">= 0.45", ">= 0.6", "missed")
    asked = as_asked(
        [
            row(f"{engine}, 1 receiver: {what}", 3.0)
            for engine in ("shm", "shm-direct", "shm-direct-shared", "tcp", "gloo")
            for what in (SPEED, CPU_OF_ALL, CPU_OF_ONE, DIGESTS, VERL)
        ]
    )
    assert [found["must"] for found in asked] == [
        *(">= 0.45", "<= 2.6", "", "<= 0.2", ""),
        *("", "<= 2.2", "", "", ""),
        *("", "<= 1.4", "", "", ""),
        *("", "", "", "<= 0.2", ">= 1"),
        *("", "", "", "<= 0.2", ">= 1"),
    ]
    assert [found["met"] for found in asked][:5] == ["aim", "missed", "", "missed", "aim"]
    assert bar_of(f"shm, 2 receivers: {CPU_OF_ALL}").must is None
    assert "| missed |" in verdict_table([{**VERDICT, "met": "no"}])


def test_an_old_verdict_names_the_newest_one():
    def made(date: str, value: float, met: str, question: str = "q") -> tuple[Path, Document]:
        row = {**VERDICT, "question": question, "value": value, "met": met}
        folder = PAGE.parent / "results" / "cpu-2x-some-24gib" / f"{date[:10]}_{value:08.0f}"
        return folder / "b.json", broken(rows=[row], utc=date if "T" in date else "")

    results = dict(
        [
            made("2026-01-04T12:00:01Z", 4.0, "aim"),
            made("2026-01-01", 1.0, "no"),
            made("2026-01-03", 3.0, "no"),
            made("2026-01-04", 6.0, "no"),
            made("2026-01-04T12:00:00Z", 7.0, "no"),
            made("2026-01-05", 5.0, "aim", "other"),
        ]
    )
    newest, *earlier, other = results
    link = "[4](results/cpu-2x-some-24gib/2026-01-04_00000004/b.json) (aim; Some CPU, 2026-01-04)"
    for path in earlier:
        assert measured_later(results, path)["q"] == link
    assert measured_later(results, newest).keys() == {"other"}
    assert measured_later(results, other) == {}
    assert verdict_table([VERDICT], {"q": link}).endswith(f"| aim | {link} |")
    assert verdict_table([VERDICT], {"other": link}) == verdict_table([VERDICT])


def test_the_headline_has_the_best_central_driver_beside_the_legacy_one():
    steps = [{**STEP, "plane": plane, "mib": 64.0, "step_s": s} for plane, s in
             (("driver", 6.0), ("driver-buffers", 0.6), ("simple", 0.2))]  # fmt: skip
    steps[2]["times_faster"] = 25.0
    text = headline(broken(rows=steps), PAGE.parent / "b.json")
    assert "| driver | a central driver, pickled as verl's DataProto is | 6 | 30 | 25 |" in text
    assert "| driver-buffers | a central driver at its best: pickled without a copy | 0.6 | 3 |  |" in text
    assert tables().startswith("## Headline")


def test_a_plain_table_by_hand():
    rows = [{"a": 1.23456, "b": "x"}, {"a": 2}]
    assert plain_table(rows, {"A": "a", "B": "b"}).splitlines() == [
        "| A | B |",
        "|---|---|",
        "| 1.235 | x |",
        "| 2 |  |",
    ]
    assert cell(True) == "True"
