"""The first difference of two batches is named with its place and both values."""

from __future__ import annotations

import numpy as np
import pytest
from kept_runs import keep_run

from rl_app_ppo.replay.differences import field_difference, metric_differences, weight_differences
from rl_protocol import BatchData, ObjectColumn, dense, ragged
from rl_trainer.checkpoints.kept_batches import columns_of, read_batch

ROWS = "rows.safetensors"


def test_metrics_that_one_side_lacks_differ_and_times_do_not():
    one = {"actor/a": 1.0, "critic/b": 2.0, "timing_s/gen": 1.0, "perf/driver_bytes": 1.0}
    assert metric_differences(1, one, {**one, "timing_s/gen": 2.0}) == []
    found = metric_differences(1, one, {"actor/a": 1.0 + 2**-52})
    assert [(line.name, line.run, line.other) for line in found] == [
        ("actor/a", "1.0", "1.0000000000000002"),
        ("critic/b", "2.0", "none"),
    ]


def test_weights_differ_by_role_and_rank():
    found = weight_differences(4, {"actor/0": "a", "actor/1": "b"}, {"actor/0": "a", "actor/1": "c"})
    assert [str(line) for line in found] == ["step 4: weights of actor/1: 'b', and 'c'"]


@pytest.fixture
def kept(tmp_path):
    files = keep_run(tmp_path, {1: [0.5, -0.5]})
    batch = read_batch(files.batches, 1)
    return batch, columns_of(files.batches, batch)


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("responses", ragged([[5, 6], [5, 7]], "int64"), "responses of row s1-0/1/0 at position 1: 6, and 7"),
        ("responses", ragged([[5, 6], [5]], "int64"), "responses of row s1-0/1/0 at position 1: 6, and none"),
        ("responses", ragged([[5, 6], [5, 6]], "int32"), "responses: ragged int64, and ragged int32"),
        (
            "scores",
            dense(np.array([0.5, np.nextafter(np.float32(-0.5), np.float32(0))], np.float32)),
            "scores of row s1-0/1/0: -0.5",
        ),
        ("extra", ObjectColumn.from_values(["a", "b"]), "extra: none, and object"),
    ],
)
def test_a_field_differs_by_a_single_value(kept, name, column, said):
    batch, columns = kept
    other = {**columns, ROWS: BatchData({**columns[ROWS].columns, name: column})}
    assert field_difference(batch, columns, batch, columns) is None
    assert f"step 1: {said}" in str(field_difference(batch, columns, batch, other))


def test_other_rows_differ_before_their_values(kept, tmp_path):
    batch, columns = kept
    files = keep_run(tmp_path / "other", {1: [9.0]})
    fewer = read_batch(files.batches, 1)
    found = field_difference(batch, columns, fewer, columns_of(files.batches, fewer))
    assert str(found) == "step 1: key at position 1: s1-0/1/0, and none"
