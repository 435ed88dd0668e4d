"""Advantage estimators against cases computed by hand and a slow oracle in plain Python."""

from __future__ import annotations

import dataclasses
import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import BatchError, ConfigError, RowKey
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, role_baselines, whiten

pytestmark = pytest.mark.numeric

NAMES = ADVANTAGE_ESTIMATORS.names()
COMPARING = [name for name in NAMES if ADVANTAGE_ESTIMATORS.get(name).compares]
# one advantage for all tokens of a session
GROUP = [name for name in COMPARING if name not in ("optimal_token_baseline", "gigpo")]
STEPWISE = [name for name in NAMES if name not in GROUP]
OPTIONAL = ("token_rewards", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights")


def inputs(keys, lengths, scores, mask=None, tokens=None, generated=None, roles=None, role_means=None, **rest):
    """Build inputs from `lengths` [N] and flat columns as lists; None where absent.

    By default all `tokens` are 0 and generated, and there is one role without a mean.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays = {
        name: np.asarray(value, float) if isinstance(value, list | np.ndarray) else value
        for name, value in rest.items()
    }
    return AdvantageInputs(
        keys=[RowKey(*key) for key in keys],
        offsets=offsets,
        mask=np.ones(int(offsets[-1]), bool) if mask is None else np.asarray(mask, bool),
        scores=np.asarray(scores, float),
        responses=np.zeros(int(offsets[-1]), int) if tokens is None else np.asarray(tokens, int),
        generated=np.ones(int(offsets[-1]), bool) if generated is None else np.asarray(generated, bool),
        roles=["game"] * len(keys) if roles is None else roles,
        role_means=role_means or {},
        **arrays,
    )


def estimate(name, *args, **kwargs):
    return ADVANTAGE_ESTIMATORS.get(name).estimate(inputs(*args, **kwargs))


# --------------------------------------------------------------------------------
# computed by hand
#
# Group a scores 1, 0, 1 with 2, 1, 3 tokens: mean 2/3, unbiased std sqrt(1/3).
# Group b scores 0, 0: no advantage.
KEYS, LENGTHS, SCORES = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)], [2, 1, 3, 1, 1], [1, 0, 1, 0, 0]
STD = math.sqrt(1 / 3) + 1e-6
BATCH_STD = math.sqrt(0.3) + 1e-6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1 / 3 / STD, -2 / 3 / STD, 1 / 3 / STD, 0, 0]),
        ("dr_grpo", [1 / 3, -2 / 3, 1 / 3, 0, 0]),
        ("rloo", [1 - 0.5, 0 - 1, 1 - 0.5, 0, 0]),  # minus the mean of the other two
        # 5 of the group's 6 tokens are in right answers
        ("opo", [1 - 5 / 6, 0 - 5 / 6, 1 - 5 / 6, 0, 0]),
        # 2 of 5 sessions have equal scores: 5 / (5 - 2)
        ("gpg", [5 / 3 * 1 / 3, -5 / 3 * 2 / 3, 5 / 3 * 1 / 3, 0, 0]),
        ("grpo_passk", [0, 0, 0, 0, 0]),  # the two best scores are equal
        ("maxrl", [0.5, -1, 0.5, 0, 0]),  # (1 - 2/3) / (2/3), and b has no right answer
        # the scores 1, 0, 1, 0, 0 of both groups: mean 2/5, unbiased variance 6/5 / 4
        ("lite_ppo", [1 / 3 / BATCH_STD, -2 / 3 / BATCH_STD, 1 / 3 / BATCH_STD, 0, 0]),
    ],
)
def test_group_estimators_by_hand(name, expected):
    advantages, returns = estimate(name, KEYS, LENGTHS, SCORES)
    assert advantages.tolist() == pytest.approx(np.repeat(expected, LENGTHS).tolist())
    assert np.array_equal(advantages, returns)


def test_pass_at_k_credits_the_lead_of_the_best():
    # 0.9 leads 0.4 by 0.5; the unbiased std of 0.1, 0.9, 0.4 is sqrt(0.49 / 3)
    keys, std = [("a", 0), ("a", 1), ("a", 2)], math.sqrt(0.49 / 3)
    assert estimate("grpo_passk", keys, [1, 1, 1], [0.1, 0.9, 0.4], norm_by_std=False)[0].tolist() == pytest.approx(
        [0, 0.5, 0]
    )
    assert estimate("grpo_passk", keys, [1, 1, 1], [0.1, 0.9, 0.4])[0].tolist() == pytest.approx(
        [0, 0.5 / (std + 1e-6), 0]
    )


def test_reinforce_plus_plus_baseline_by_hand():
    # tokens 0.5, 0.5, -0.5: mean 1/6, unbiased variance 1/3
    advantages, _ = estimate("reinforce_plus_plus_baseline", [("a", 0), ("a", 1)], [2, 1], [1, 0])
    scale = math.sqrt(1 / 3 + 1e-8)
    assert advantages.tolist() == pytest.approx([1 / 3 / scale, 1 / 3 / scale, -2 / 3 / scale])


def test_raft_by_hand():
    """All of the best are trained on, and none where the best is not above 0."""
    keys = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0)]
    advantages, _ = estimate("raft", keys, [1, 2, 1, 1, 1, 1], [0.5, 0.2, 0.5, 0.0, -1.0, 0.1])
    assert advantages.tolist() == [1, 0, 0, 1, 0, 0, 1]


def test_reinforce_plus_plus_by_hand():
    # returns 0.25, 0.5, 1 with gamma 0.5: mean 7/12
    advantages, returns = estimate("reinforce_plus_plus", [("a", 0)], [3], [1], gamma=0.5)
    x = np.array([0.25, 0.5, 1.0])
    assert returns.tolist() == [0.25, 0.5, 1.0]
    assert advantages.tolist() == pytest.approx(((x - 7 / 12) / np.sqrt(x.var(ddof=1) + 1e-8)).tolist())


def test_remax_by_hand():
    # penalty -0.1 per token: rewards -0.1, 0.9; returns 0.8, 0.9; the greedy answer scores 0.5
    advantages, returns = estimate("remax", [("a", 0)], [2], [1], token_rewards=[-0.1, -0.1], reward_baselines=[0.5])
    assert returns.tolist() == pytest.approx([0.8, 0.9])
    assert advantages.tolist() == pytest.approx([0.3, 0.4])


def test_opd_by_hand():
    # teacher minus student: session 0 has 0.5 and -1, session 1 -2.5, session 2 of another prompt 1
    advantages, returns = estimate(
        "opd",
        [("a", 0), ("a", 1), ("b", 0)],
        [2, 1, 1],
        [0, 1, 0],
        old_log_probs=[-1.0, -1.0, -0.5, -2.0],
        ref_log_prob=[-0.5, -2.0, -3.0, -1.0],
    )
    assert returns.tolist() == [0.5, -1.0, -2.5, 1.0]
    assert advantages.tolist() == [0.5 + 2.5, -1.0, -2.5 - 0.5, 1.0]  # no other session has a second token


def test_gae_by_hand():
    # rewards 0, 0, 1, values 0.5, 0.4, 0.2, gamma 1, lam 0.5
    # delta = -0.1, -0.2, 0.8 -> A = 0.8; -0.2 + 0.5 * 0.8 = 0.2; -0.1 + 0.5 * 0.2 = 0.0
    advantages, returns = estimate("gae", [("a", 0)], [3], [1], values=[0.5, 0.4, 0.2], lam=0.5)
    assert returns.tolist() == pytest.approx([0.5, 0.6, 1.0])
    assert advantages.tolist() == pytest.approx(whiten(np.array([0.0, 0.2, 0.8])).tolist())


def test_gdpo_by_hand():
    # Both components are normalized to +-1 / sqrt(2), so the second one counts although it is 100
    # times smaller.
    # With weights 1 and 2, session 0 has (1 - 2) c and session 1 (-1 + 2) c. Whitened over the two
    # tokens: -+1 / sqrt(2).
    advantages, _ = estimate(
        "gdpo",
        [("a", 0), ("a", 1)],
        [1, 1],
        [0, 0],
        reward_components=np.array([[1.0, 0.0], [0.0, 0.01]]),
        component_weights=[1.0, 2.0],
    )
    assert advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-3)


def test_gigpo_by_hand():
    # Token 7 of the policy, tokens 1 and 2 of the environment:
    # session 0: 7, 1 -> 7, 2 -> 7 (score 1); session 1: 7, 1 -> 7 (score 0); session 2: 7, 2 -> 7
    # (score 0). Returns with gamma 0.5: 0.25, 0.5, 1; 0, 0; 0, 0.
    # First turns: 0.25, 0, 0; turns that answer 1: 0.5, 0; turns that answer 2: 1, 0.
    tokens = [7, 1, 7, 2, 7, 7, 1, 7, 7, 2, 7]
    given = {
        "mask": [token == 7 for token in tokens],
        "tokens": tokens,
        "generated": [token == 7 for token in tokens],
        "gamma": 0.5,
    }
    session, first = [2 / 3, -1 / 3, -1 / 3], [1 / 6, -1 / 12, -1 / 12]
    keys = [("a", 0), ("a", 1), ("a", 2)]
    advantages, returns = estimate("gigpo", keys, [5, 3, 3], [1, 0, 0], norm_by_std=False, step_coef=2.0, **given)
    expected = [
        *(session[0] + 2 * first[0], 0, session[0] + 2 * 0.25, 0, session[0] + 2 * 0.5),
        *(session[1] + 2 * first[1], 0, session[1] - 2 * 0.25),
        *(session[2] + 2 * first[2], 0, session[2] - 2 * 0.5),
    ]
    assert advantages.tolist() == pytest.approx(expected)
    assert np.array_equal(advantages, returns)
    normalized, _ = estimate("gigpo", keys, [5, 3, 3], [1, 0, 0], **given)
    deviation = math.sqrt(1 / 3) + 1e-6, 0.5 * math.sqrt(0.5) + 1e-6
    assert normalized[2] == pytest.approx(2 / 3 / deviation[0] + 0.25 / deviation[1])


def test_rae_by_hand():
    """The dealer's mean is 0.5, then 0.5 * 0.5 + 0.5 * 1, then half of it; the guest's is 0."""
    x = inputs(
        [("a", 0), ("b", 0), ("c", 0)],
        [2, 1, 1],
        [1, 0.8, 0],
        roles=["poker/dealer", "poker/guest", "poker/dealer"],
        role_means={"poker/dealer": 0.5, "chess": 0.3},
        role_decay=0.5,
    )
    advantages, returns = ADVANTAGE_ESTIMATORS.get("rae").estimate(x)
    assert advantages.tolist() == [0.5, 0.5, 0.8, -0.75]
    assert np.array_equal(advantages, returns)
    assert role_baselines(x)[1] == {"poker/dealer": 0.375, "poker/guest": 0.4, "chess": 0.3}
    with pytest.raises(ConfigError, match="adv_estimator=rae needs the roles of the prompts"):
        ADVANTAGE_ESTIMATORS.get("rae").estimate(dataclasses.replace(x, roles=None))


def test_gigpo_without_the_tokens_is_refused():
    x = dataclasses.replace(inputs([("a", 0)], [1], [1]), responses=None)
    with pytest.raises(ConfigError, match="adv_estimator=gigpo needs the tokens of the responses"):
        ADVANTAGE_ESTIMATORS.get("gigpo").estimate(x)


def test_gigpo_is_grpo_where_turns_count_nothing():
    """The states of turns, and their returns, have no part in it with step_coef=0."""
    rest = {"tokens": [1, 2, 3, 4, 5], "generated": [True, False, True, True, True]}
    scores, lengths, keys = [1, 0], [3, 2], [("a", 0), ("a", 1)]
    got, _ = estimate("gigpo", keys, lengths, scores, rest["generated"], step_coef=0.0, **rest)
    assert got.tolist() == estimate("grpo", keys, lengths, scores, rest["generated"])[0].tolist()


def test_optimal_token_baseline_by_hand():
    # pi = 0.5 and sum pi^2 = 0.5 everywhere: each token adds 1 - 1 + 0.5 = 0.5, and session 0's
    # first token with rho = 2 adds 2.
    # Position 0: W = 2 and 0.5, G = 1 and 0, so B = 0.8.
    # Position 1: W = 2.5 and 1, so B = 2.5 / 3.5.
    # Position 2: session 0 alone, no baseline.
    advantages, returns = estimate(
        "optimal_token_baseline",
        [("a", 0), ("a", 1)],
        [3, 2],
        [1, 0],
        old_log_probs=[math.log(0.5)] * 5,
        sum_pi_squared=[0.5] * 5,
        rollout_is_weights=[2, 1, 1, 1, 1],
    )
    assert returns.tolist() == [1, 1, 1, 0, 0]
    assert advantages.tolist() == pytest.approx([0.2, 1 - 2.5 / 3.5, 1, -0.8, -2.5 / 3.5])


# --------------------------------------------------------------------------------
# oracle


def per_row(flat, lengths):
    return np.split(np.asarray(flat), np.cumsum(lengths)[:-1])


def oracle(name, x: AdvantageInputs):
    """Return advantages by row and token, straight from the definitions, with plain loops."""
    lengths = np.diff(x.offsets).tolist()
    columns = {n: None if getattr(x, n) is None else per_row(getattr(x, n), lengths) for n in OPTIONAL}
    mask = per_row(x.mask, lengths)
    members: dict = {}
    for i, key in enumerate(x.keys):
        members.setdefault((key.uid, key.session), []).append(i)
    sessions = {}
    for name_of, rows in members.items():
        rows.sort(key=lambda i: x.keys[i].index)
        tokens = [(i, t) for i in rows for t in range(lengths[i]) if mask[i][t]]
        if tokens:
            rewards = [columns["token_rewards"][i][t] if columns["token_rewards"] else 0.0 for i, t in tokens]
            rewards[-1] += x.scores[rows[-1]]
            sessions[name_of] = (tokens, rewards, rows[-1])
    groups: dict = {}
    for uid, session in sessions:
        groups.setdefault(uid, []).append((uid, session))
    out = [[0.0] * n for n in lengths]

    def column(name, at):
        return [columns[name][i][t] for i, t in at]

    def spread(values):
        for session, value in values.items():
            for (i, t), v in zip(sessions[session][0], value, strict=True):
                out[i][t] = v

    def on_all(values):
        spread({s: [v] * len(sessions[s][0]) for s, v in values.items()})

    def whitened():
        cells = [cell for tokens, _, _ in sessions.values() for cell in tokens]
        values = [out[i][t] for i, t in cells]
        if len(values) < 2 or min(values) == max(values):
            scaled = [0.0] * len(values)
        else:
            scaled = [(v - fmean(values)) / math.sqrt(stdev(values) ** 2 + 1e-8) for v in values]
        for (i, t), v in zip(cells, scaled, strict=True):
            out[i][t] = v

    def against(score, rule):
        """Apply `rule` to every session of a group in which scores differ; other sessions get 0.

        `rule` takes (own, all, own length, all lengths).
        """
        values = {}
        for names in groups.values():
            all_scores = [score[s] for s in names]
            sizes = [len(sessions[s][0]) for s in names]
            for s in names:
                differ = min(all_scores) < max(all_scores)
                values[s] = rule(score[s], all_scores, sizes) if differ else 0.0
        return values

    score = {s: sum(rewards) for s, (_, rewards, _) in sessions.items()}
    scale = (lambda xs: stdev(xs) + 1e-6) if x.norm_by_std else (lambda _: 1.0)
    n, of_all = len(sessions), [score[s] for s in sessions if sessions[s][0]]
    teaching = sum(len(g) for g in groups.values() if len({score[s] for s in g}) > 1)
    rules = {
        "grpo": lambda own, xs, _: (own - fmean(xs)) / scale(xs),
        "dr_grpo": lambda own, xs, _: own - fmean(xs),
        "rloo": lambda own, xs, _: own - (sum(xs) - own) / (len(xs) - 1),
        "maxrl": lambda own, xs, _: (own - fmean(xs)) / fmean(xs),
        "opo": lambda own, xs, sizes: own - sum(a * b for a, b in zip(xs, sizes, strict=True)) / sum(sizes),
        "gpg": lambda own, xs, _: n / teaching * (own - fmean(xs)),
        "lite_ppo": lambda own, xs, _: (own - fmean(xs)) / (stdev(of_all) + 1e-6),
        "grpo_passk": lambda own, xs, _: (own - sorted(xs)[-2]) / scale(xs) if own == max(xs) else 0.0,
        "reinforce_plus_plus_baseline": lambda own, xs, _: own - fmean(xs),
    }
    if name in rules:
        on_all(against(score, rules[name]))
    elif name == "gigpo":
        of_session = against(score, rules["grpo"])
        turns = turns_of(x, sessions, lengths)
        for parts in turns.values():
            later = 0.0
            for part in reversed(parts):
                later = part["return"] = sum(part["rewards"]) + x.gamma * later
        everywhere = [(s, part) for s, parts in turns.items() for part in parts]
        for s, part in everywhere:
            same = [p["return"] for o, p in everywhere if o[0] == s[0] and p["state"] == part["state"]]
            step = (part["return"] - fmean(same)) / scale(same) if min(same) < max(same) else 0.0
            for i, t in part["tokens"]:
                out[i][t] = of_session[s] + x.step_coef * step
    elif name == "rae":
        means, baselines = dict(x.role_means), {}
        for s in sorted(sessions):
            role = x.roles[sessions[s][2]]
            baselines[s] = means.get(role, 0.0)
            if sessions[s][0]:
                means[role] = x.role_decay * baselines[s] + (1 - x.role_decay) * score[s]
        on_all({s: score[s] - baselines[s] for s in sessions})
    elif name == "raft":
        best = {s: max(score[o] for o in names) for names in groups.values() for s in names}
        on_all({s: float(own > 0 and own == best[s]) for s, own in score.items()})
    elif name == "gdpo":
        total = dict.fromkeys(sessions, 0.0)
        for k in range(x.reward_components.shape[1]):
            part = {s: x.reward_components[last, k] for s, (_, _, last) in sessions.items()}
            for s, v in against(part, rules["grpo"]).items():
                total[s] += x.component_weights[k] * v
        on_all(total)
    else:
        values = {}
        for s, (tokens, rewards, last) in sessions.items():
            if name == "opd":
                teacher, student = (column(which, tokens) for which in ("ref_log_prob", "old_log_probs"))
                values[s] = [a - b for a, b in zip(teacher, student, strict=True)]
                continue
            if name == "gae":
                v = [*column("values", tokens), 0.0]
                delta = [r + x.gamma * v[t + 1] - v[t] for t, r in enumerate(rewards)]
                values[s] = [
                    sum((x.gamma * x.lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
                    for t in range(len(delta))
                ]
                continue
            gamma = x.gamma if name == "reinforce_plus_plus" else 1.0
            togo = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
            values[s] = [g - x.reward_baselines[last] for g in togo] if name == "remax" else togo
        if name == "optimal_token_baseline":
            values = optimal_baseline(values, sessions, groups, columns)
        if name == "opd":
            values = against_the_same_place(values, groups)
        spread(values)
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        whitened()
    return [v for row in out for v in row]


def turns_of(x, sessions, lengths):
    """Turns with tokens to train on, by session: where they are, their rewards and state."""
    ids, own = per_row(x.responses, lengths), per_row(x.generated, lengths)
    found: dict = {}
    for s, (tokens, rewards, _) in sessions.items():
        last = None
        for (i, t), reward in zip(tokens, rewards, strict=True):
            start = t
            while start > 0 and own[i][start - 1]:
                start -= 1
            seen = start
            while seen > 0 and not own[i][seen - 1]:
                seen -= 1
            if last != (i, start):
                last = (i, start)
                found.setdefault(s, []).append({"tokens": [], "rewards": [], "state": ids[i][seen:start].tolist()})
            found[s][-1]["tokens"].append((i, t))
            found[s][-1]["rewards"].append(reward)
    return found


def against_the_same_place(values, groups):
    out = {}
    for names in groups.values():
        for s in names:
            others = [[values[o][t] for o in names if o != s and len(values[o]) > t] for t in range(len(values[s]))]
            out[s] = [v - fmean(xs) if xs else v for v, xs in zip(values[s], others, strict=True)]
    return out


def optimal_baseline(togo, sessions, groups, columns):
    energy = {}
    for s, (tokens, _, _) in sessions.items():
        steps = []
        for i, t in tokens:
            rho = columns["rollout_is_weights"][i][t] if columns["rollout_is_weights"] else 1.0
            step = 1 - 2 * math.exp(columns["old_log_probs"][i][t]) + columns["sum_pi_squared"][i][t]
            steps.append(step * rho * rho)
        energy[s] = [sum(steps[: t + 1]) for t in range(len(steps))]
    out = {}
    for names in groups.values():
        for s in names:
            out[s] = []
            for t, g in enumerate(togo[s]):
                there = [o for o in names if len(togo[o]) > t]
                baseline = sum(togo[o][t] * energy[o][t] for o in there) / (sum(energy[o][t] for o in there) + 1e-8)
                out[s].append(0.0 if len(names) == 1 else g - baseline if len(there) > 1 else g)
    return out


@st.composite
def batches(draw):
    """Sessions of one to three trajectories, with observation tokens, empty and rejected rows."""
    keys = [
        (uid, session, index)
        for uid in ("a", "b", "c")[: draw(st.integers(1, 3))]
        for session in range(draw(st.integers(1, 4)))
        for index in range(draw(st.sampled_from([1, 1, 1, 2, 3])))
    ]
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(keys), max_size=len(keys)))
    total = sum(lengths)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 1.0, 1.0, 0.3], len(keys))
    log_probs = np.log(rng.uniform(0.05, 0.95, total))
    p = np.exp(log_probs)
    mask = rng.random(total) < draw(st.sampled_from([1.0, 0.7]))
    return inputs(
        [keys[i] for i in rng.permutation(len(keys))],
        lengths,
        scores,
        mask,
        rng.integers(0, 2, total),
        mask | (rng.random(total) < 0.3),
        [["dealer", "guest"][i] for i in rng.integers(0, 2, len(keys))],
        {"dealer": 0.2},
        role_decay=0.9,
        token_rewards=draw(st.sampled_from([None, -0.1 * rng.random(total)])),
        values=rng.normal(size=total),
        old_log_probs=log_probs,
        ref_log_prob=log_probs + rng.normal(size=total),
        sum_pi_squared=p * p + (1 - p) ** 2 * rng.uniform(0.2, 1, total),
        rollout_is_weights=draw(st.sampled_from([None, rng.uniform(0.5, 2, total)])),
        reward_baselines=rng.normal(size=len(keys)),
        reward_components=rng.choice([0.0, 1.0, 2.0], (len(keys), 2)),
        component_weights=[1.0, 0.5],
        gamma=draw(st.sampled_from([1.0, 0.9])),
        lam=draw(st.sampled_from([1.0, 0.7, 0.0])),
        step_coef=draw(st.sampled_from([1.0, 0.5])),
        norm_by_std=draw(st.booleans()),
    )


def without_penalties(name, x):
    """Leave out the negative rewards that MaxRL refuses."""
    return dataclasses.replace(x, token_rewards=None) if name == "maxrl" else x


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(x=batches())
def test_every_estimator_equals_the_oracle(name, x):
    x = without_penalties(name, x)
    advantages, returns = ADVANTAGE_ESTIMATORS.get(name).estimate(x)
    assert advantages.tolist() == pytest.approx(oracle(name, x), abs=1e-7, rel=1e-7)
    assert not advantages[~x.mask].any()
    assert not returns[~x.mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_names_the_settings_that_change_its_result(name):
    rng = np.random.default_rng(3)
    given = inputs(
        [("a", 0), ("a", 1), ("a", 2)],
        [3, 3, 3],
        [1, 0.3, 0],
        mask=[1, 0, 1] * 3,
        generated=[1, 0, 1] * 3,  # two turns
        old_log_probs=np.log(rng.uniform(0.1, 0.9, 9)),
        ref_log_prob=np.log(rng.uniform(0.1, 0.9, 9)),
        **{column: rng.uniform(0.1, 1, 9) for column in ("values", "sum_pi_squared", "rollout_is_weights")},
        token_rewards=np.linspace(0, 0.3, 9),
        reward_baselines=rng.uniform(0.1, 1, 3),
        reward_components=rng.uniform(0, 1, (3, 1)),
        component_weights=[1.0],
        norm_by_std=False,
    )
    changes = {"gamma": {"gamma": 0.5}, "lam": {"lam": 0.5}, "norm_adv_by_std_in_grpo": {"norm_by_std": True}}
    estimator = ADVANTAGE_ESTIMATORS.get(name)

    def advantages(**change):
        return estimator.estimate(dataclasses.replace(given, **change))[0].tolist()

    usual = advantages()
    assert tuple(one for one, change in changes.items() if advantages(**change) != usual) == estimator.settings


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=10)
@given(x=batches(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_changes_not_one_bit(name, x, seed):
    x = without_penalties(name, x)
    order = np.random.default_rng(seed).permutation(len(x.keys))
    lengths = np.diff(x.offsets)
    place = np.concatenate([np.zeros(0, int), *(np.arange(x.offsets[i], x.offsets[i + 1]) for i in order)])
    moved = {
        n: None if getattr(x, n) is None else getattr(x, n)[place]
        for n in (*OPTIONAL, "mask", "responses", "generated")
    }
    moved |= {n: getattr(x, n)[order] for n in ("scores", "reward_baselines", "reward_components")}
    moved["roles"] = [x.roles[i] for i in order]
    shuffled = dataclasses.replace(
        x,
        keys=[x.keys[i] for i in order],
        offsets=np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        **moved,
    )
    function = ADVANTAGE_ESTIMATORS.get(name).estimate
    for original, other in zip(function(x), function(shuffled), strict=True):
        assert original[place].tobytes() == other.tobytes()


# --------------------------------------------------------------------------------
# sessions and rejection


@pytest.mark.parametrize("name", GROUP)
def test_a_session_counts_once_and_its_last_trajectory_is_what_is_scored(name):
    """Only the last of session 0's three trajectories is scored.

    Its advantage is that of one long trajectory, on all tokens of the session.
    """
    parts = np.array([[5.0, 5.0], [6.0, 6.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    keys = [("a", 0, 1), ("a", 0, 0), ("a", 0, 2), ("a", 1, 0), ("a", 2, 0)]
    several, _ = estimate(
        name, keys, [1, 1, 1, 1, 1], [7, 9, 1, 0, 0.5], reward_components=parts, component_weights=[2.0, 1.0]
    )
    joined, _ = estimate(
        name,
        [("a", 0), ("a", 1), ("a", 2)],
        [3, 1, 1],
        [1, 0, 0.5],
        reward_components=parts[2:],
        component_weights=[2.0, 1.0],
    )
    assert several.tolist() == joined.tolist()
    assert several[0] == several[1] == several[2] > several[3]


@pytest.mark.parametrize("name", [name for name in STEPWISE if name != "gigpo"])  # a trajectory begins a turn
def test_a_session_of_several_trajectories_is_one_episode(name):
    """Tokens of the first trajectory get the score of the last one."""
    rng = np.random.default_rng(0)
    flat = {"values": rng.normal(size=5), "old_log_probs": -rng.random(5), "sum_pi_squared": rng.random(5)}
    flat["ref_log_prob"] = -rng.random(5)
    several, _ = estimate(
        name,
        [("a", 0, 0), ("a", 0, 1), ("a", 1)],
        [2, 1, 2],
        [9, 1, 0],
        reward_baselines=[9, 0.2, 0.2],
        gamma=0.9,
        **flat,
    )
    joined, _ = estimate(name, [("a", 0), ("a", 1)], [3, 2], [1, 0], reward_baselines=[0.2, 0.2], gamma=0.9, **flat)
    assert several.tolist() == joined.tolist()


def test_a_final_trajectory_without_tokens_still_scores_its_session():
    advantages, _ = estimate("dr_grpo", [("a", 0, 0), ("a", 0, 1), ("a", 1)], [1, 1, 1], [7, 1, 0], [True, False, True])
    assert advantages.tolist() == [0.5, 0.0, -0.5]


def three_sessions(name, present, mask=None, sessions=(0, 1, 2)):
    """Return the advantages of the sessions in `present`, out of three of one prompt.

    The three sessions have one token each and score 1, 0 and 100.
    """
    scores = np.array([1.0, 0.0, 100.0])[present]
    return estimate(
        name,
        [("a", sessions[i]) for i in present],
        [1] * len(present),
        scores,
        mask,
        reward_components=scores[:, None],
        component_weights=[1.0],
        reward_baselines=[0.5] * len(present),
        values=np.array([0.1, 0.2, 0.3])[present],
        old_log_probs=np.array([-1.0, -0.5, -2.0])[present],
        ref_log_prob=np.array([-0.5, -1.0, -1.0])[present],
        sum_pi_squared=np.array([0.5, 0.6, 0.7])[present],
    )[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_rejected_session_does_not_shift_the_baseline_of_its_siblings(name):
    with_rejected = three_sessions(name, [0, 1, 2], [True, True, False])
    assert with_rejected == [*three_sessions(name, [0, 1]), 0.0]
    assert with_rejected[0] > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_session_that_failed_is_no_session_that_scored_zero(name):
    """A failed session has no rows; the others are compared, whatever their numbers are."""
    assert three_sessions(name, [0, 2]) == three_sessions(name, [0, 2], sessions=(0, 1, 7))
    alone = three_sessions(name, [2])
    assert alone == three_sessions(name, [2], sessions=(5, 5, 0))
    if name in COMPARING:
        assert alone == [0.0]
        # session 1 scored 0
        assert three_sessions(name, [0, 2]) != three_sessions(name, [0, 1, 2])[::2]


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_teaches_nothing(name):
    advantages, _ = estimate(
        name,
        [("a", 0)],
        [2],
        [5.0],
        reward_components=np.array([[5.0]]),
        component_weights=[1.0],
        old_log_probs=[-1, -1],
        sum_pi_squared=[0.5, 0.5],
    )
    assert advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [*GROUP, "gigpo"])
def test_equal_scores_teach_exactly_nothing(name):
    """A rounding error in the mean, divided by a tiny deviation, must not become an advantage.

    In floats, 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    """
    advantages, _ = estimate(
        name,
        [("a", i) for i in range(3)],
        [1, 1, 1],
        [0.1] * 3,
        reward_components=np.full((3, 1), 0.1),
        component_weights=[1.0],
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_the_score_reaches_the_last_token_the_policy_made():
    """Rewards pass over observation tokens, also over those at the end of an episode."""
    _, returns = estimate("reinforce_plus_plus", [("a", 0)], [4], [1], [True, False, True, False], gamma=0.5)
    assert returns.tolist() == [0.5, 0.0, 1.0, 0.0]


def test_whiten():
    assert whiten(np.array([1.0, 3.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert whiten(np.array([4.0])).tolist() == [0.0]
    assert whiten(np.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gae", "needs values; got none. Use algorithm=ppo"),
        ("remax", "needs reward_baselines"),
        ("gdpo", "needs reward_components; got none. Name them in AlgorithmConfig.gdpo_reward_keys"),
        ("optimal_token_baseline", "needs old_log_probs"),
        ("opd", "needs ref_log_prob; got none. The ref stage writes it"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(name, message):
    with pytest.raises(ConfigError, match=message):
        estimate(name, [("a", 0)], [1], [1])


def test_maxrl_refuses_negative_rewards_and_is_the_gradient_of_the_log_likelihood_on_average():
    """The mean gradient over all outcomes of N draws is that of log p to order N - 1."""
    with pytest.raises(BatchError, match=r"maxrl needs rewards of at least 0, such as 0 and 1; got -0\.5"):
        estimate("maxrl", [("a", 0), ("a", 1)], [1, 1], [1, -0.5])
    n, p = 4, 0.3
    gradient = 0.0  # by the logit of p: the score of a draw is r - p
    for draws in np.ndindex(*(2,) * n):
        advantages, _ = estimate("maxrl", [("a", i) for i in range(n)], [1] * n, list(draws))
        probability = math.prod(p if r else 1 - p for r in draws)
        gradient += probability * fmean(a * (r - p) for a, r in zip(advantages, draws, strict=True))
    # d/dlogit of -sum_{k < n} (1 - p)^k / k
    assert gradient == pytest.approx(p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, n)))


def test_weights_that_do_not_fit_the_parts_are_refused():
    with pytest.raises(ConfigError, match="one weight for each of the 2 keys; got 3"):
        estimate("gdpo", [("a", 0)], [1], [1], reward_components=np.ones((1, 2)), component_weights=[1.0, 1.0, 1.0])


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(BatchError, match="named 'a/0/0'"):
        estimate("grpo", [("a", 0), ("a", 0)], [1, 1], [1, 0])


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_is_no_error(name):
    x = inputs([], [], [], reward_baselines=[], values=[], old_log_probs=[], ref_log_prob=[], sum_pi_squared=[])
    x = dataclasses.replace(x, reward_components=np.zeros((0, 1)))
    assert ADVANTAGE_ESTIMATORS.get(name).estimate(x)[0].tolist() == []
