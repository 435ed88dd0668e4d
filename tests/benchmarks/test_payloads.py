"""Rows, bytes and shares of a step's payload."""

from __future__ import annotations

import numpy as np
import pytest
from ppo_step.compute import Workload, make_compute
from ppo_step.graph import step_graph, written
from ppo_step.payloads import FAMILIES, Layout, rollout_batch, row_keys, row_lengths, rows_for
from ppo_step.planes import Plan
from ppo_step.stores import DataProto, as_declared

from rl_protocol import BatchData, DenseColumn, RaggedColumn, RowKey

TEXT, TINY = FAMILIES["text"], FAMILIES["tiny"]


def test_bytes_of_a_padded_row_by_hand():
    assert TEXT.row_bytes(("prompts",)) == 2048 * 8
    assert TEXT.row_bytes(("responses", "response_mask", "rollout_log_probs", "scores")) == 8192 * (8 + 1 + 4) + 4
    assert FAMILIES["moe"].row_bytes(("chosen_experts",)) == (512 + 2048) * 48 * 8
    assert FAMILIES["vl"].row_bytes(("pixel_values",)) == 512 * 1536 * 2
    assert TEXT.row_bytes(("ground_truth",)) == 0


def test_rows_come_in_whole_prompts_for_up_to_sixteen_workers():
    columns = written(step_graph(TEXT))
    assert rows_for(TEXT, columns, 1) == 16
    rows = rows_for(TEXT, columns, 256 << 20)
    assert rows % 16 == 0
    assert abs(rows * TEXT.row_bytes(columns) / (256 << 20) - 1) < 0.02


def test_layouts_hold_the_same_rows():
    columns, rows = step_graph(TINY)["rollout"].writes, range(4, 12)
    lengths = row_lengths(TINY, 16, seed=3)
    padded, ragged = (rollout_batch(TINY, columns, lengths, rows, layout, 3) for layout in ("padded", "ragged"))
    assert padded.field_names == ragged.field_names == columns
    for name in ("prompts", "responses", "pixel_values", "chosen_experts"):
        rows_of = ragged.ragged(name).rows()
        assert padded.dense(name).values.shape[1] == TINY.width(name)
        for wide, row in zip(padded.dense(name).values, rows_of, strict=True):
            assert np.array_equal(wide[: len(row)], row)
            assert not wide[len(row) :].any()
    assert ragged.nbytes < padded.nbytes


def test_lengths_are_a_quarter_to_all_and_a_prompt_has_one_length():
    lengths = row_lengths(TEXT, 64, seed=0)
    assert lengths["responses"].min() >= 2048
    assert lengths["responses"].max() <= 8192
    assert (lengths["prompts"].reshape(-1, 8) == lengths["prompts"].reshape(-1, 8)[:, :1]).all()
    assert np.array_equal(lengths["responses"], row_lengths(TEXT, 64, seed=0)["responses"])


def test_keys_name_prompt_and_session():
    assert row_keys(3, 10)[8:] == [RowKey("s3-1", 0).text, RowKey("s3-1", 1).text]


def plan(workers: int) -> Plan:
    return Plan(Workload(family="tiny", layout="padded", rows=32, workers=workers))


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_every_row_is_made_once_and_dealt_once(workers: int):
    p = plan(workers)
    for shares in (p.made, p.dealt):
        assert len(shares) == workers
        assert sorted(row for share in shares for row in share) == list(range(32))
    assert sorted(p.order) == list(range(32))


def test_the_graph_is_the_trainers_with_the_columns_of_the_family():
    graph = step_graph(TINY)
    assert [stage.name for stage in graph.stages] == ["rollout", "reward", "old_log_prob", "ref", "adv", "update_actor"]
    assert {"chosen_experts", "pixel_values"} <= set(graph["rollout"].writes)
    for name in ("old_log_prob", "ref", "update_actor"):
        assert "pixel_values" in graph[name].reads
    assert "pixel_values" not in graph["adv"].reads + graph["reward"].reads


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_without_compute_every_stage_writes_columns_of_the_right_shape(layout: Layout):
    graph = step_graph(TINY)
    load = Workload(family="tiny", layout=layout, rows=16, workers=1)
    compute, batch, keys = make_compute(load, 0), BatchData({}, 16), row_keys(1, 16)
    for stage in graph.stages:
        out = compute.stage(stage, 1, keys, batch.select_fields(stage.reads))
        assert set(out.field_names) == set(stage.writes)
        batch = BatchData({**batch.columns, **out.columns}, 16)
    kind = DenseColumn if layout == "padded" else RaggedColumn
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        assert isinstance(batch[name], kind)
        assert batch[name].buffers[0].shape == batch["responses"].buffers[0].shape
    assert set(batch.field_names) == set(written(graph))


def test_a_real_policy_refuses_padding():
    with pytest.raises(ValueError, match="ragged"):
        make_compute(Workload(family="tiny", layout="padded", rows=16, workers=1, real=True), 0)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_data_proto_brings_back_what_it_took(layout: Layout):
    columns = step_graph(TINY)["rollout"].writes
    batch = rollout_batch(TINY, columns, row_lengths(TINY, 16, 0), range(16), layout, 0)
    other = DataProto.__new__(DataProto)
    other.__setstate__(DataProto(batch).__getstate__())
    back = other.batch
    assert set(back.field_names) == set(columns)
    assert back.select_fields(columns).union(batch).field_names == columns  # union refuses columns that differ


def test_what_came_back_jagged_is_dense_again():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    jagged = BatchData({"x": RaggedColumn(values.reshape(-1), np.array([0, 4, 8, 12]), "float32")})
    assert np.array_equal(as_declared(jagged, {"x": "dense"}).dense("x").values, values)
    assert as_declared(jagged, {"x": "ragged"})["x"] is jagged["x"]
