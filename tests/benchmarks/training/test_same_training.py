"""Training is the same, bit by bit, over every data plane."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
from ppo_step.compute import TinyPolicy, Workload
from ppo_step.graph import step_graph
from ppo_step.payloads import FAMILIES, row_keys

from rl_protocol import BatchData, RaggedColumn

GRAPH = step_graph(FAMILIES["tiny"])
ONE = Workload(family="tiny", layout="ragged", rows=16, workers=1, real=True)


def one_step(policy: TinyPolicy, step: int, *, spoil: str = "") -> bytes:
    """A step in this process; `spoil` names a column in which one number is changed."""
    keys, batch = row_keys(step, 16), BatchData({}, 16)
    for stage in GRAPH.stages:
        read = batch.select_fields(stage.reads)
        if stage.name == "update_actor" and spoil:
            read = BatchData({**read.columns, spoil: spoiled(read.ragged(spoil))})
        out = policy.stage(stage, step, keys, read)
        batch = BatchData({**batch.columns, **out.columns}, 16)
    return policy.parameters()


def spoiled(column: RaggedColumn) -> RaggedColumn:
    values = column.values.copy()
    values.reshape(-1)[3] = not values.reshape(-1)[3] if column.dtype == "bool" else values.reshape(-1)[3] // 2 - 1
    return RaggedColumn(values, column.offsets, column.dtype)


@pytest.mark.parametrize("column", ["pixel_values", "chosen_experts", "old_log_probs", "advantages", "ref_log_prob"])
def test_one_wrong_number_changes_the_parameters(column: str):
    assert one_step(TinyPolicy(ONE), 1) == one_step(TinyPolicy(ONE), 1)
    assert one_step(TinyPolicy(ONE), 1, spoil=column) != one_step(TinyPolicy(ONE), 1)


def test_what_is_rolled_out_depends_on_the_parameters():
    policy = TinyPolicy(ONE)
    keys, nothing = row_keys(9, 16), BatchData({}, 16)
    before = policy.stage(GRAPH["rollout"], 9, keys, nothing)
    one_step(policy, 1)
    after = policy.stage(GRAPH["rollout"], 9, keys, nothing)
    assert np.array_equal(before.ragged("pixel_values").values, after.ragged("pixel_values").values)
    assert not np.array_equal(before.ragged("rollout_log_probs").values, after.ragged("rollout_log_probs").values)


def digests(printed: str) -> dict[str, str]:
    rows = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("{")]
    assert all(row["steps"] == 3 for row in rows)
    return {row["plane"]: row["parameters_sha256"] for row in rows}


@pytest.fixture(scope="module")
def found(script: Callable[..., str]) -> dict[str, str]:
    """Plane -> digest of the parameters after three steps, for all installed planes."""
    planes = ["driver", "driver-buffers", *(["transferqueue"] if find_spec("transfer_queue") else []), "simple", "ray"]
    asked = ("--same-training", "3", "--planes", ",".join(planes))
    made = digests(script("bench_controller_bottleneck.py", "--smoke", *asked))
    assert list(made) == planes
    return made


@pytest.mark.nightly
def test_parameters_are_bit_equal_after_three_steps_through_the_driver_and_through_ours(found: dict[str, str]):
    assert len({found[plane] for plane in ("driver", "driver-buffers", "simple", "ray")}) == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("bench_group")
def test_parameters_are_bit_equal_after_three_steps_through_transferqueue(found: dict[str, str]):
    assert len({found[plane] for plane in ("driver", "transferqueue", "simple")}) == 1
