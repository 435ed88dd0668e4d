"""Advantage estimators against hand-computed cases and slow, literal oracles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.advantages import AdvantageInputs, gae, grpo, kl_penalty, whiten


def inputs(keys, lengths, scores, mask=None, rewards=None, values=None, **settings):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    if rewards is None:
        rewards = np.zeros(total)
        for i, length in enumerate(lengths):
            if length:
                rewards[offsets[i + 1] - 1] = scores[i]
    return AdvantageInputs(
        keys=[RowKey(*key) for key in keys],
        offsets=offsets,
        mask=np.ones(total, bool) if mask is None else np.asarray(mask, bool),
        token_level_rewards=np.asarray(rewards, float),
        scores=np.asarray(scores, float),
        values=None if values is None else np.asarray(values, float),
        **settings,
    )


def per_row(flat, lengths):
    return [row.tolist() for row in np.split(flat, np.cumsum(lengths)[:-1])]


def test_grpo_by_hand():
    # group a: 1, 0, 1 -> mean 2/3, unbiased std sqrt(1/3); group b: 0, 0 -> no difference, no advantage
    adv, returns = grpo(inputs([("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)], [2, 1, 3, 1, 1], [1, 0, 1, 0, 0]))
    std = np.sqrt(1 / 3) + 1e-6
    assert per_row(adv, [2, 1, 3, 1, 1]) == [
        pytest.approx([1 / 3 / std] * 2),
        pytest.approx([-2 / 3 / std]),
        pytest.approx([1 / 3 / std] * 3),
        [0.0],
        [0.0],
    ]
    assert np.array_equal(adv, returns)


def test_dr_grpo_does_not_divide_by_the_deviation():
    adv, _ = grpo(inputs([("a", 0), ("a", 1)], [1, 1], [3, 1], norm_by_std=False))
    assert adv.tolist() == [1.0, -1.0]


def test_a_group_of_one_teaches_nothing():
    adv, _ = grpo(inputs([("a", 0)], [2], [5.0]))
    assert adv.tolist() == [0.0, 0.0]


def test_a_session_counts_once_and_its_last_trajectory_is_what_is_scored():
    # session 0 has three trajectories whose early scores must not matter; session 1 has one
    keys = [("a", 0, 1), ("a", 0, 0), ("a", 0, 2), ("a", 1, 0)]
    adv, _ = grpo(inputs(keys, [1, 1, 1, 1], [7, 9, 1, 0], norm_by_std=False))
    assert adv.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_a_fully_masked_row_does_not_shift_the_baseline_of_its_siblings():
    keys = [("a", 0), ("a", 1), ("a", 2)]
    adv, _ = grpo(inputs(keys, [1, 1, 1], [1, 0, 100], mask=[True, True, False], norm_by_std=False))
    assert adv.tolist() == [0.5, -0.5, 0.0]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.floats(-2, 2)), min_size=1, max_size=24),
    st.randoms(use_true_random=False),
)
def test_grpo_does_not_depend_on_the_order_of_rows(rows, random):
    keys = [(uid, session * 100 + i) for i, (uid, session, _) in enumerate(rows)]
    scores = [score for _, _, score in rows]
    adv, _ = grpo(inputs(keys, [1] * len(rows), scores))
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled, _ = grpo(inputs([keys[i] for i in order], [1] * len(rows), [scores[i] for i in order]))
    assert shuffled.tolist() == pytest.approx(adv[order].tolist(), abs=1e-9)


def slow_gae(rewards, values, mask, gamma, lam):
    """One trajectory, straight from the definition: A_t = sum of (gamma lam)^k delta over the tokens the policy made."""
    made = [t for t in range(len(rewards)) if mask[t]]
    out = [0.0] * len(rewards)
    for place, t in enumerate(made):
        total = 0.0
        for k, u in enumerate(made[place:]):
            following = made[place + k + 1] if place + k + 1 < len(made) else None
            delta = rewards[u] + gamma * (values[following] if following is not None else 0.0) - values[u]
            total += (gamma * lam) ** k * delta
        out[t] = total
    return out


def test_gae_by_hand():
    # one trajectory, rewards 0, 0, 1, values 0.5, 0.4, 0.2, gamma 1, lam 0.5
    # delta = -0.1, -0.2, 0.8 -> A = 0.8; -0.2 + 0.5 * 0.8 = 0.2; -0.1 + 0.5 * 0.2 = 0.0
    _, returns = gae(inputs([("a", 0)], [3], [1], values=[0.5, 0.4, 0.2], lam=0.5))
    assert returns.tolist() == pytest.approx([0.5, 0.6, 1.0])


@given(st.data())
def test_gae_equals_the_definition_also_around_observation_tokens(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    total = sum(lengths)
    numbers = st.floats(-1, 1)
    rewards, values = (data.draw(st.lists(numbers, min_size=total, max_size=total)) for _ in range(2))
    mask = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    gamma, lam = data.draw(st.sampled_from([(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)]))
    adv, returns = gae(
        inputs(
            [("a", i) for i in range(len(lengths))],
            lengths,
            [0] * len(lengths),
            mask,
            rewards,
            values,
            gamma=gamma,
            lam=lam,
        )
    )
    expected = [
        a
        for part in zip(
            *(np.split(np.asarray(x), np.cumsum(lengths)[:-1]) for x in (rewards, values, mask)), strict=True
        )
        for a in slow_gae(*part, gamma, lam)
    ]
    chosen = np.asarray(mask, bool)
    assert returns[chosen].tolist() == pytest.approx(
        (np.asarray(expected) + np.asarray(values))[chosen].tolist(), abs=1e-9
    )
    assert adv.tolist() == pytest.approx(whiten(np.asarray(expected, float), chosen).tolist(), abs=1e-6)
    assert not adv[~chosen].any()
    assert not returns[~chosen].any()


def test_gae_without_a_critic_says_what_to_do():
    with pytest.raises(ConfigError, match="algorithm=ppo"):
        gae(inputs([("a", 0)], [1], [1]))


def test_whiten():
    out = whiten(np.array([1.0, 3.0, 99.0]), np.array([True, True, False]))
    assert out.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])
    assert whiten(np.array([4.0]), np.array([True])).tolist() == [0.0]
    assert whiten(np.array([4.0]), np.array([False])).tolist() == [0.0]


def test_kl_estimators_by_hand():
    lp, ref = np.log(np.array([0.5])), np.log(np.array([0.25]))
    d = np.log(2.0)
    assert kl_penalty(lp, ref, "k1")[0] == pytest.approx(d)
    assert kl_penalty(ref, lp, "abs")[0] == pytest.approx(d)
    assert kl_penalty(lp, ref, "k2")[0] == pytest.approx(d * d / 2)
    assert kl_penalty(lp, ref, "k3")[0] == pytest.approx(0.5 - 1 + d)
    with pytest.raises(ConfigError, match="k4"):
        kl_penalty(lp, ref, "k4")


def test_k1_and_k3_estimate_the_true_divergence():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    truth = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_penalty(np.log(p), np.log(q), kind)).sum()) == pytest.approx(truth)
