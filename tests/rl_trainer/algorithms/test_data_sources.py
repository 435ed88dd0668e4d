"""Estimators, and weights of the parts of the loss, by data source."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import BatchData, ConfigError, KVBatchMeta, ObjectColumn, dense, ragged
from rl_trainer import ActorConfig, AlgorithmConfig, build_graph, step_columns
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, estimate_advantages
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.config import PolicyLossConfig

SOURCES = ("math", "chat", "answers")


def settings(loss_mode="vanilla", **algorithm):
    return AdvantageSettings(
        algorithm=AlgorithmConfig(**algorithm),
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        response_length=8,
        kl_coef=0.0,
        rng=np.random.default_rng(0),
        role_means={"math": 0.5, "chat": 0.25},
    )


def batch(scores, lengths=None, given=()):
    """Three responses to a prompt of each of SOURCES; those of sources in `given` are answers."""
    lengths = lengths or [2] * len(scores)
    rng = np.random.default_rng(1)
    sources = [SOURCES[i // 3 % 3] for i in range(len(scores))]

    def column(make, dtype="float32"):
        return ragged([make(size) for size in lengths], dtype)

    columns = {
        "prompts": ragged([[1]] * len(scores), "int64"),
        "responses": column(lambda size: rng.integers(1, 9, size), "int64"),
        "response_mask": column(lambda size: [True] * size, "bool"),
        "demonstration": ragged([[s in given] * n for s, n in zip(sources, lengths, strict=True)], "bool"),
        "scores": dense(np.array(scores, np.float32)),
        "acc": dense(np.zeros(len(scores), np.float32)),
        "reward_components": ragged([[score] for score in scores], "float32"),
        "reward_baselines": dense(np.full(len(scores), 0.25, np.float32)),
        **{
            name: column(lambda size: rng.normal(-1, 0.3, size))
            for name in ("old_log_probs", "ref_log_prob", "sum_pi_squared", "entropy")
        },
        "data_source": ObjectColumn.from_values(sources),
        "extra_info": ObjectColumn.from_values({} for _ in sources),
    }
    keys = tuple(f"{chr(ord('a') + i // 3)}/{i % 3}/0" for i in range(len(scores)))
    return KVBatchMeta(partition="train", keys=keys), BatchData(columns)


def test_advantages_weights_and_metrics_of_three_sources_by_hand():
    """GRPO without the division on math: 1 - 1/3 and 0 - 1/3. RLOO on chat: 4 - 1 and
    1 - (4 + 1) / 2. Cross-entropy of the answers alone."""
    by_source = ("adv_estimator=rloo@chat", "rl_coef=0.5@chat", "rl_coef=0@answers", "sft_coef=2@answers")
    by_source += ("ref_kl_coef=0.25@math",)
    meta, data = batch([1, 0, 0, 4, 1, 1, 1, 1, 1], lengths=[1, 2, 1, 1, 1, 2, 1, 1, 1], given=("answers",))
    columns, metrics, *_ = estimate_advantages(meta, data, settings(norm_adv_by_std_in_grpo=False, by_source=by_source))
    assert columns.ragged("advantages").values.tolist() == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3, -1 / 3, 3.0, -1.5, -1.5, -1.5, 0.0, 0.0, 0.0]
    )
    weights = {part: columns.ragged(f"{part}_weights").values.tolist() for part in ("rl", "ce", "ref_kl")}
    assert weights == {
        "rl": [1.0] * 4 + [0.5] * 4 + [0.0] * 3,
        "ce": [0.0] * 8 + [2.0] * 3,
        "ref_kl": [0.25] * 4 + [1.0] * 4 + [0.0] * 3,
    }
    assert columns.ragged("loss_mask").values.all()
    assert metrics["critic/score/mean"] == pytest.approx(7 / 6)
    assert metrics["source/math/score/mean"] == pytest.approx(1 / 3)
    assert (metrics["source/chat/score/max"], metrics["source/chat/score/min"]) == (4.0, 1.0)
    assert metrics["source/math/advantages/mean"] == pytest.approx((2 / 3 - 3 / 3) / 4)
    assert metrics["source/chat/advantages/min"] == pytest.approx(-1.5)
    assert [metrics[f"source/{source}/tokens"] for source in SOURCES] == [4.0, 4.0, 0.0]
    assert "source/answers/score/mean" not in metrics


def test_gamma_and_lam_of_a_source_by_hand():
    """GAE of responses of two tokens with values 0: A = lam gamma r, r, whitened over the rows of
    the source; the returns are not.
    """
    meta, data = batch([1, 2, 4, 1, 2, 4])
    data = data.union(BatchData({"values": ragged([[0.0, 0.0]] * 6, "float32")}))
    by_source = ("gamma=0.5@chat", "lam=0.25@chat")
    columns = estimate_advantages(meta, data, settings(adv_estimator="gae", lam=0.5, by_source=by_source)).columns
    returns = columns.ragged("returns").values.tolist()
    assert returns == pytest.approx([0.5, 1, 1, 2, 2, 4, 0.125, 1, 0.25, 2, 0.5, 4])
    advantages = columns.ragged("advantages").values
    for rows in (slice(0, 6), slice(6, 12)):
        own = np.array(returns[rows])
        assert advantages[rows].tolist() == pytest.approx(((own - own.mean()) / own.std(ddof=1)).tolist(), rel=1e-5)


MIXED = [name for name in ADVANTAGE_ESTIMATORS.names() if "values" not in ADVANTAGE_ESTIMATORS.get(name).reads]


@pytest.mark.parametrize("name", MIXED)
def test_a_source_is_estimated_as_if_alone(name):
    """REINFORCE++ has the other rows: statistics over the batch are over the source's rows."""
    rng = np.random.default_rng(5)
    meta, data = batch(rng.uniform(0, 1, 18).tolist(), lengths=rng.integers(1, 4, 18).tolist())
    parts = {"gdpo_reward_keys": ("score",)} if name == "gdpo" else {}
    by_source = tuple(f"{setting}@chat" for setting in (f"adv_estimator={name}", "norm_adv_by_std_in_grpo=false"))
    mixed = estimate_advantages(meta, data, settings(adv_estimator="reinforce_plus_plus", by_source=by_source, **parts))
    chat = [i for i, source in enumerate(data.objects("data_source").values()) if source == "chat"]
    alone = {"reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus"}}
    alone[name] = {"adv_estimator": name, "norm_adv_by_std_in_grpo": False, **parts}
    together = name == "reinforce_plus_plus"  # with another option of the estimator, and so apart
    for rows, own in ((chat, name), ([i for i in range(18) if i not in chat], "reinforce_plus_plus")):
        if together:
            own = name
        expected = estimate_advantages(meta.select_rows(rows), data.select_rows(rows), settings(**alone[own]))
        for column in ("advantages", "returns"):
            got = mixed.columns.select_rows(rows).ragged(column).values.tolist()
            assert got == pytest.approx(expected.columns.ragged(column).values.tolist(), rel=1e-6), (own, column)
        if own == "rae":
            assert mixed.role_means["chat"] == expected.role_means["chat"] != 0.25
            assert mixed.role_means["math"] == 0.5


def test_chosen_tokens_are_of_rows_with_a_policy_loss():
    scores = np.random.default_rng(2).uniform(0, 1, 9).tolist()
    meta, data = batch(scores, lengths=[4] * 9)
    algorithm = settings("kl_cov", by_source=("rl_coef=0@math", "echo_coef=1@math"))
    chosen = estimate_advantages(meta, data, algorithm).columns.ragged("chosen_tokens").rows()
    assert not any(row.any() for row in list(chosen)[:3])


def test_a_weight_of_one_source_makes_columns_and_a_run_without_reads_no_sources():
    plain, kl = step_columns(AlgorithmConfig(), ActorConfig()), ActorConfig(use_kl_loss=True)
    assert "data_source" not in build_graph(AlgorithmConfig(), ActorConfig())["adv"].reads
    assert plain.part_weights == ()
    for text, columns in {
        "adv_estimator=rloo@chat": (),
        "rl_coef=0.5@chat": ("rl_weights",),
        "ref_kl_coef=0@chat": ("ref_kl_weights",),
        "sft_coef=1@chat": ("rl_weights", "ce_weights", "ref_kl_weights"),
    }.items():
        graph = build_graph(AlgorithmConfig(by_source=(text,)), kl)
        assert "data_source" in graph["adv"].reads
        assert tuple(name for name in graph["update_actor"].reads if name.endswith("_weights")) == columns
        assert ("demonstration" in graph["rollout"].writes) == text.startswith("sft")
    assert "reward_baselines" in build_graph(AlgorithmConfig(by_source=("adv_estimator=remax@chat",)), kl)["adv"].reads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (("rl_coef=1",), "setting=value@source"),
        (("clip=1@chat",), "with one of adv_estimator, "),
        (("lam=1.5@chat",), "lam from 0 to 1"),
        (("gamma=nan@chat",), "gamma from 0 to 1"),
        (("rl_coef=x@chat",), "can't be read; write rl_coef=0.5@chat"),
        (("norm_adv_by_std_in_grpo=yes@chat",), "can't be read"),
        (("rl_coef=-1@chat",), "finite and at least 0"),
        (("rl_coef=nan@chat",), "finite and at least 0"),
        (("rl_coef=1@chat", "rl_coef=2@chat"), "each setting of a source once"),
    ],
)
def test_what_is_no_setting_of_a_source_is_refused(text, words):
    with pytest.raises(ConfigError, match=rf"by_source.*{words}"):
        AlgorithmConfig(by_source=text)


def test_the_answer_is_one_response_or_all():
    """All where the others would not be trained on."""
    alone = ("sft_coef=1@alone", "rl_coef=0@alone")
    config = AlgorithmConfig(by_source=("sft_coef=1@both", *alone, "rl_coef=0@distilled"))
    sources = ("other", "both", "alone", "distilled")
    for divergence in (False, True):
        given = [config.given_responses(source, 8, divergence=divergence) for source in sources]
        assert given == [0, 1, 8, 0]
    assert [config.ref_kl_coef(source) for source in sources] == [1.0, 1.0, 0.0, 1.0]
    config = AlgorithmConfig(by_source=(*alone, "ref_kl_coef=0.5@alone"))
    assert [config.given_responses("alone", 8, divergence=d) for d in (False, True)] == [8, 1]
    assert AlgorithmConfig(sft_coef=0.5).given_responses("any", 8, divergence=False) == 1


def test_a_prompt_that_is_trained_on_its_answer_alone_has_one_response():
    alone = ("sft_coef=1@alone", "rl_coef=0@alone")
    config = AlgorithmConfig(by_source=("sft_coef=1@both", *alone, "rl_coef=0@distilled"))
    sources = ("other", "both", "alone", "distilled")
    assert [config.sessions(source, 8, divergence=True) for source in sources] == [8, 8, 1, 8]
    assert config.fewest_sessions(8, divergence=True) == 1
    assert AlgorithmConfig(sft_coef=1.0).fewest_sessions(8, divergence=False) == 8
    weighed = AlgorithmConfig(by_source=(*alone, "ref_kl_coef=0.5@alone"))
    assert [weighed.fewest_sessions(8, divergence=d) for d in (False, True)] == [1, 8]
