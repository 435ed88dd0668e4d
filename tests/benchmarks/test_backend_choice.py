"""The recommended backend and payload files, with numbers computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from choose_backend import EXAMPLE
from harness.backend_choice import Measured, make_batch, read_payload, recommend, table

FACTOR = "times faster than"


def one(backend: str, put: float, get: float, cpu: float = 1.0, memory: int = 100 << 20) -> Measured:
    return Measured(
        backend=backend,
        put_s=put,
        get_s=get,
        put_p99_s=2 * put,
        get_p99_s=3 * get,
        put_cpu_s=cpu,
        get_cpu_s=cpu,
        memory_bytes=memory,
    )


def test_reads_decide():
    writer, reader = one("simple", put=1.0, get=1.0), one("ray", put=2.0, get=0.25)
    assert (
        recommend([writer, reader], reads=1)[0] == "simple"
    )  # 2.0 against 2.25 s: near, as little CPU, the faster one
    best, why = recommend([writer, reader], reads=7)  # 8.0 against 3.75 s
    assert best == "ray"
    assert any("2.13 times faster than simple" in reason for reason in why)


def test_near_ties_go_to_less_cpu():
    best, why = recommend([one("simple", 1.0, 1.0, cpu=2.0), one("ray", 1.1, 1.1, cpu=0.5)], reads=1)
    assert best == "ray"
    assert "takes the least CPU" in why[0]


def test_memory_is_told_but_does_not_decide():
    best, why = recommend([one("simple", 1, 1, memory=300 << 20), one("ray", 5, 5, memory=100 << 20)], reads=1)
    assert best == "simple"
    assert any("ray needs less memory: 100 MiB against 300" in reason for reason in why)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="install"):
        recommend([], reads=1)


def test_a_row_by_hand():
    row = one("simple", put=0.5, get=0.25, cpu=0.5, memory=3 << 29).row("p", nbytes=1 << 30, reads=3)
    assert (row["put_gib_s"], row["get_gib_s"], row["put_p99_ms"], row["get_p99_ms"]) == (2.0, 4.0, 1000.0, 750.0)
    assert (row["cpu_s_per_gib"], row["memory_per_byte"], row["copies"]) == (0.5, 1.5, "1+0")
    assert len(table([row]).splitlines()) == 2


def test_the_example_is_what_it_says():
    spec = read_payload(EXAMPLE)
    batch = make_batch(spec)
    assert len(batch) == 64
    assert batch.ragged("pixel_values").dims == (1536,)
    assert batch.ragged("pixel_values").lengths.min() >= 128
    assert make_batch(spec).nbytes == batch.nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: 0\ncolumns: {x: {kind: dense}}", "rows >= 1"),
        ("rows: 1\ncolumns: {}", "columns"),
        ("rows: 1\ncolumns: {x: {kind: square}}", "square|kind"),
        ("rows: 1\ncolumns: {x: {kind: ragged, length: [4, 2]}}", "least, most"),
        ("rows: 1\ncolumns: {x: {kind: dense, typo: 1}}", "typo"),
        ("rows: 1\ncolumns: {x: {kind: dense, dtype: float31}}", "float31"),
        ("rows: [", "p.yaml"),
    ],
)
def test_what_is_wrong_with_a_payload_is_named(text: str, message: str, tmp_path: Path):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_payload(path)
