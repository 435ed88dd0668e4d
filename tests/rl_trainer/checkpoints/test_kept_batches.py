"""Columns of every kind survive their file bit by bit; damaged batches are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_protocol import BatchData, ConfigError, DenseColumn, ObjectColumn, RaggedColumn, dense, ragged
from rl_trainer.checkpoints.checkpoint_folder import FileFacts
from rl_trainer.checkpoints.held_batches import SavedRows
from rl_trainer.checkpoints.kept_batches import (
    KeptBatch,
    drop_after,
    kept_steps,
    publish,
    read_batch,
    read_columns,
    unpublished,
    write_columns,
)


def batch(step, **more):
    nothing = SavedRows(partition="train", keys=())
    facts = {"version": 0, "critic_updates": 0, "metrics": {}, "weights": {"actor/0": "ab"}, "files": {}, **more}
    return KeptBatch(step=step, rows=nothing, prompts=nothing, **facts)


def test_columns_of_every_kind_come_back(tmp_path):
    data = BatchData(
        {
            "scores": dense(np.array([0.5, np.nan], np.float32)),
            "half": DenseColumn(np.array([1, 2], np.uint16), "bfloat16"),
            "responses": ragged([[1, 2, 3], []], "int64"),
            "positions": RaggedColumn(np.arange(6, dtype=np.int32).reshape(2, 3), np.array([0, 2, 2]), "int32", 1),
            "extra_info": ObjectColumn.from_values([{"a": "\x1b[0m"}, None]),
        }
    )
    write_columns(tmp_path / "rows.safetensors", data)
    found = read_columns(tmp_path / "rows.safetensors")
    assert found.field_names == data.field_names
    for name, column in data.columns.items():
        other = found[name]
        assert (other.kind, other.dtype, other.dims) == (column.kind, column.dtype, column.dims)
        for one, two in zip(column.buffers, other.buffers, strict=True):
            assert one.tobytes() == two.tobytes()
    assert found["positions"].row(0).tolist() == [[0, 3], [1, 4], [2, 5]]
    plain = load_file(tmp_path / "rows.safetensors")
    assert plain["responses/offsets"].tolist() == [0, 3, 3]


def test_a_published_batch_replaces_that_of_an_earlier_attempt(tmp_path):
    for digest in ("ab", "cd"):
        publish(tmp_path, batch(3, weights={"actor/0": digest}), "a: 1\n", -1)
    found = read_batch(tmp_path, 3)
    assert found.weights == {"actor/0": "cd"}
    assert (tmp_path / "step-000003" / "config.yaml").read_text() == "a: 1\n"


def test_numbers_that_are_not_finite_come_back(tmp_path):
    metrics = {"actor/pg_loss": np.nan, "actor/grad_norm": np.inf, "actor/entropy": -np.inf}
    publish(tmp_path, batch(1, metrics=metrics), "", -1)
    np.testing.assert_equal(read_batch(tmp_path, 1).metrics, metrics)


def test_batches_of_later_steps_and_unfinished_ones_are_dropped(tmp_path):
    for step in (2, 3, 4):
        publish(tmp_path, batch(step), "", -1)
    unpublished(tmp_path, 5).mkdir()
    drop_after(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    drop_after(tmp_path / "none", 2)
    assert kept_steps(tmp_path / "none") == []


def test_a_damaged_batch_is_refused_by_the_name_of_its_file(tmp_path):
    publish(tmp_path, batch(1), "a: 1\n", -1)
    (tmp_path / "step-000001" / "config.yaml").write_text("a: 2\n")
    with pytest.raises(ConfigError, match=r"step-000001 is damaged: config.yaml is not what was written"):
        read_batch(tmp_path, 1)
    publish(tmp_path, batch(2, format=2), "", -1)
    with pytest.raises(ConfigError, match="has the format 2, and this version reads 1"):
        read_batch(tmp_path, 2)
    publish(tmp_path, batch(3, files={"rows.safetensors": FileFacts(1, "00")}), "", -1)
    with pytest.raises(ConfigError, match="step-000003 can't be read"):
        read_batch(tmp_path, 3)
    (tmp_path / "rows.safetensors").write_bytes(b"12345678")
    with pytest.raises(ConfigError, match=r"rows.safetensors can't be read"):
        read_columns(tmp_path / "rows.safetensors")
