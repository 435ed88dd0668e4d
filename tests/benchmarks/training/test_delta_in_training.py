"""The figures of bench_delta_in_training, by hand."""

from __future__ import annotations

from bench_delta_in_training import row, verdicts


def sync(share: float, delta: float) -> dict[str, float]:
    return {"weight_sync/bytes": 2000.0, "weight_sync/changed_share": share, "weight_sync/delta_bytes": delta}


def test_a_row_and_its_verdicts():
    made = row("1e-6", [sync(0.02, 60.0), sync(0.10, 440.0), sync(0.0, 0.0)])
    assert made["delta_syncs"] == 3
    assert made["of_ideal_max"] == 440 / (0.10 * 1000 * 4)
    assert made["of_full_max"] == 0.22
    assert made["sparse_syncs"] == 2
    assert made["of_full_max_where_sparse"] == 0.03
    assert made["changed_share_median"] == 0.02
    assert [(v["value"], v["met"]) for v in verdicts([made])] == [(1.1, "must"), (0.03, "aim")]
    dense = row("1e-2", [sync(0.5, 2000.0)])
    assert [v["met"] for v in verdicts([dense])] == ["aim"]
    assert dense["of_full_max_where_sparse"] is None
