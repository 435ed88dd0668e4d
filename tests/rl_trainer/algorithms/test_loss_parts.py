"""The weights of the parts of a token's loss, and what carries them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_protocol import BatchData, KVBatchMeta, ObjectColumn, dense, ragged
from rl_trainer import ActorConfig, AlgorithmConfig, build_graph, step_columns
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, estimate_advantages
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.loss_parts import PartCoefs, part_weights
from rl_trainer.config import PolicyLossConfig, RolloutCorrectionConfig

KL = ActorConfig(use_kl_loss=True)
SFT = AlgorithmConfig(rl_coef=0.0, sft_coef=1.0)
GIVEN = np.array([False, False, True, False])
OBSERVED = np.array([False, False, False, True])


def test_the_weights_by_hand():
    coefs = PartCoefs(rl=np.float32(0.5), sft=np.float32(2), echo=np.float32(0.25), ref_kl=np.float32(1))
    weights = part_weights(GIVEN, OBSERVED, coefs)
    assert {name: values.tolist() for name, values in weights.items()} == {
        "rl_weights": [0.5, 0.5, 0.0, 0.0],
        "ce_weights": [0.0, 0.0, 2.0, 0.25],
        "ref_kl_weights": [1.0, 1.0, 0.0, 0.0],
    }
    assert {values.dtype.name for values in weights.values()} == {"float32"}


@pytest.mark.parametrize(
    ("algorithm", "actor", "columns"),
    [
        (AlgorithmConfig(), KL, ()),
        (AlgorithmConfig(sft_coef=0.1), ActorConfig(), ("rl_weights", "ce_weights")),
        (AlgorithmConfig(sft_coef=0.1), KL, ("rl_weights", "ce_weights", "ref_kl_weights")),
        (AlgorithmConfig(rl_coef=2.0), ActorConfig(), ("rl_weights",)),
        (SFT, ActorConfig(), ("ce_weights",)),
        (AlgorithmConfig(echo_coef=0.1), KL, ("rl_weights", "ce_weights", "ref_kl_weights")),
    ],
)
def test_a_weight_that_is_the_same_for_all_tokens_has_no_column(algorithm, actor, columns):
    """A run that sets none writes, moves and reads none."""
    graph = build_graph(algorithm, actor)
    assert step_columns(algorithm, actor).part_weights == columns
    for stage, names in (("adv", graph["adv"].writes), ("update_actor", graph["update_actor"].reads)):
        assert tuple(name for name in names if name.endswith("l_weights") or name == "ce_weights") == columns, stage
    assert ("demonstration" in graph["rollout"].writes) == bool(algorithm.sft_coef)


def test_answers_alone_need_no_other_log_probs():
    stages = build_graph(SFT, ActorConfig())
    assert [stage.name for stage in stages.stages] == ["rollout", "reward", "adv", "update_actor"]
    assert stages["update_actor"].reads == ("prompts", "responses", "response_mask", "ce_weights")


def settings(**algorithm):
    return AdvantageSettings(
        algorithm=AlgorithmConfig(**algorithm),
        policy_loss=PolicyLossConfig(),
        response_length=8,
        kl_coef=0.0,
        rng=np.random.default_rng(0),
    )


def responses(groups=3, n=4, seed=0):
    """A batch of `n` responses to each prompt; its names."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, groups * n)

    def column(make, dtype="float32"):
        return ragged([make(size) for size in lengths], dtype)

    data = BatchData(
        {
            "prompts": ragged([[1]] * len(lengths), "int64"),
            "responses": column(lambda size: rng.integers(1, 9, size), "int64"),
            "response_mask": column(lambda size: np.ones(size, np.bool_), "bool"),
            "rollout_log_probs": column(lambda size: -rng.random(size)),
            "old_log_probs": column(lambda size: -rng.random(size)),
            "ref_log_prob": column(lambda size: -rng.random(size)),
            "entropy": column(lambda size: rng.random(size)),
            "sum_pi_squared": column(lambda size: rng.random(size)),
            "reward_components": ragged(rng.random((len(lengths), 1)).tolist(), "float32"),
            "reward_baselines": dense(rng.random(len(lengths)).astype(np.float32)),
            "scores": dense(rng.random(len(lengths)).astype(np.float32)),
            "acc": dense(rng.random(len(lengths)).astype(np.float32)),
            "data_source": ObjectColumn.from_values(["game"] * len(lengths)),
            "extra_info": ObjectColumn.from_values([{"role": "ab"[i % 2]} for i in range(len(lengths))]),
        }
    )
    return KVBatchMeta(partition="train", keys=tuple(f"{g}/{s}/0" for g in range(groups) for s in range(n))), data


ESTIMATORS = [name for name in ADVANTAGE_ESTIMATORS.names() if "values" not in ADVANTAGE_ESTIMATORS.get(name).reads]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_answer_changes_no_advantage_and_no_metric_of_the_responses(name):
    """Where the last response to each prompt is the data's, the others train as if alone."""
    n, (meta, data) = 4, responses()
    algorithm = {"adv_estimator": name, **({"gdpo_reward_keys": ("score",)} if name == "gdpo" else {})}
    given = np.array([int(key.split("/")[1]) == n - 1 for key in meta.keys])
    lengths = data.ragged("responses").lengths
    column = {"demonstration": ragged([[g] * size for g, size in zip(given, lengths, strict=True)], "bool")}
    mixed, metrics, *_ = estimate_advantages(
        meta, BatchData({**data.columns, **column}), settings(**algorithm, sft_coef=0.5)
    )
    others = np.flatnonzero(~given).tolist()
    alone, expected, *_ = estimate_advantages(meta.select_rows(others), data.select_rows(others), settings(**algorithm))
    kept = mixed.select_rows(others)
    assert kept.ragged("advantages").values.tolist() == alone.ragged("advantages").values.tolist()
    assert not mixed.select_rows(np.flatnonzero(given).tolist()).ragged("advantages").values.any()
    assert mixed.ragged("loss_mask").values.all()
    for about in ("critic/score/mean", "critic/acc/mean", "critic/advantages/max", "training/rollout_probs_diff_mean"):
        assert metrics[about] == expected[about]
    of_lengths = [name for name in expected if name.startswith("response_length/")]
    assert {name: metrics[name] for name in of_lengths} == {name: expected[name] for name in of_lengths}
    assert len(of_lengths) == 4
    assert metrics["demonstration/score/mean"] == pytest.approx(float(data.dense("scores").values[given].mean()))


def test_observations_are_trained_on_and_change_no_advantage():
    """Every second token is the policy's, every fourth an observation, and the rest a context."""
    meta, data = responses()
    lengths = data.ragged("responses").lengths
    mask = ragged([[i % 2 == 0 for i in range(size)] for size in lengths], "bool")
    seen = ragged([[i % 4 == 1 for i in range(size)] for size in lengths], "bool")
    data = BatchData({**data.columns, "response_mask": mask, "observation": seen})
    without, expected, *_ = estimate_advantages(meta, data, settings())
    columns, metrics, *_ = estimate_advantages(meta, data, settings(echo_coef=0.25))
    assert columns.ragged("advantages").values.tolist() == without.ragged("advantages").values.tolist()
    assert metrics == expected
    assert columns.ragged("loss_mask").values.tolist() == (mask.values | seen.values).tolist()
    assert without.ragged("loss_mask").values.tolist() == mask.values.tolist()
    assert columns.ragged("ce_weights").values.tolist() == [0.25 if one else 0.0 for one in seen.values]
    rl = columns.ragged("rl_weights").values[mask.values | seen.values]
    assert rl.tolist() == mask.values[mask.values | seen.values].astype(float).tolist()


def test_rejected_tokens_are_no_observations():
    meta, data = responses()
    seen = ragged([[False] * size for size in data.ragged("responses").lengths], "bool")
    data = BatchData({**data.columns, "rollout_log_probs": data["old_log_probs"], "observation": seen})
    correction = RolloutCorrectionConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("2.0_3.0",))
    columns, *_ = estimate_advantages(meta, data, settings(echo_coef=1.0, rollout_correction=correction))
    assert not columns.ragged("loss_mask").values.any()
    assert not columns.ragged("ce_weights").values.any()


def test_answers_alone_have_no_reward():
    meta, data = responses(n=1)
    lengths = data.ragged("responses").lengths
    given = {"demonstration": ragged([[True] * size for size in lengths], "bool")}
    names = ("prompts", "responses", "response_mask", "scores", "acc")
    data = BatchData({**{name: data[name] for name in names}, **given})
    columns, metrics, *_ = estimate_advantages(meta, data, dataclasses.replace(settings(), algorithm=SFT))
    assert columns.ragged("ce_weights").values.tolist() == [1.0] * int(lengths.sum())
    assert "critic/score/mean" not in metrics
    assert "response_length/mean" not in metrics
    assert metrics["demonstration/score/max"] == pytest.approx(float(data.dense("scores").values.max()))
