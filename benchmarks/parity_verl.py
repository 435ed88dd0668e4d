"""Compare our estimators, losses and corrections with those of verl 0.9.1.

    uv run benchmarks/parity_verl.py [--batches 100] [--folder DIR] [--smoke]

Installs verl (without its dependencies) into a temporary folder, feeds both sides the same random
ragged batches, and compares values and gradients to 1e-5. Then shows the inputs on which the two
differ on purpose, each with its reason and both answers. Exits with code 1 on a difference that is
not explained, or on agreement where a difference is claimed. Writes JSON beside the other results.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.results import command_line, write_result

from rl_protocol import RowKey
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rl_trainer.algorithms.covariance_tokens import clip_cov_tokens, kl_cov_tokens
from rl_trainer.algorithms.kl import adaptive_kl_coef
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.losses.aggregate import BatchCounts, aggregate
from rl_trainer.algorithms.losses.kl_loss import kl_loss
from rl_trainer.algorithms.losses.loss_function import LossInputs
from rl_trainer.algorithms.losses.value_loss import value_loss
from rl_trainer.algorithms.rollout_correction import MaskedRows, importance_weights, offpolicy_metrics, reject
from rl_trainer.config import ActorConfig, PolicyLossConfig
from rl_trainer.config.actor import LOSS_AGG_MODES
from rl_trainer.config.kl import KL_LOSSES
from rl_trainer.config.rollout_correction import parse_bounds, parse_rejections

VERL = ["verl==0.9.1", "codetiming", "orjson"]
TOLERANCE = 1e-5
LOW, HIGH, SCALE = 0.2, 0.28, 7


class Batch:
    """A ragged batch and its right-padded form. N rows, T tokens, L the longest row."""

    def __init__(self, seed: int, *, groups: int = 4, observations: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.uids = [f"p{g}" for g in range(groups) for _ in range(int(rng.integers(2, 5)))]
        self.keys = [RowKey(uid, i) for i, uid in enumerate(self.uids)]
        self.lengths = rng.integers(1, 9, len(self.uids))
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        total = int(self.offsets[-1])
        self.row = np.repeat(np.arange(self.lengths.size), self.lengths)
        self.mask = rng.random(total) < 0.8 if observations else np.ones(total, bool)
        self.mask[self.offsets[1:] - 1] = (
            True  # verl loses a reward on a token the policy did not make; see the differences
        )
        self.scores = rng.normal(size=self.lengths.size)
        self.penalty = np.where(self.mask, -0.05 * rng.random(total), 0.0)
        self.old = np.log(rng.uniform(0.05, 0.95, total))
        self.log_prob = np.minimum(self.old + rng.normal(0, 0.3, total), -0.01 * rng.uniform(0.1, 1, total))  # no ties
        self.rollout = self.old + rng.normal(0, 0.2, total)
        self.values, self.token = rng.normal(size=total), rng.normal(size=total)
        self.adv = rng.normal(size=self.lengths.size)[self.row]
        self.squares = np.exp(2 * self.old) + 0.1 * rng.random(total)
        self.parts = (
            np.round(8 * rng.normal(size=(self.lengths.size, 2))) / 8
        )  # verl takes them in float32, where these are exact

    def pad(self, flat: np.ndarray[Any, Any]) -> torch.Tensor:
        """[T] -> [N, L], zeros at the right."""
        out = torch.zeros((self.lengths.size, int(self.lengths.max())), dtype=torch.tensor(flat).dtype)
        out[torch.arange(out.shape[1])[None] < torch.tensor(self.lengths)[:, None]] = torch.tensor(flat)
        return out

    def flat(self, padded: torch.Tensor) -> np.ndarray[Any, Any]:
        """[N, L] -> [T]."""
        inside = torch.arange(padded.shape[1])[None] < torch.tensor(self.lengths)[:, None]
        return padded.detach()[inside].double().numpy()

    @property
    def padded_mask(self) -> torch.Tensor:
        return self.pad(self.mask.astype(np.float64))

    @property
    def rewards(self) -> torch.Tensor:
        """verl's token_level_rewards."""
        flat = self.penalty.copy()
        flat[self.offsets[1:] - 1] += self.scores
        return self.pad(flat)

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(tokens=int(self.mask.sum()), sequences=int(self.lengths.size))


# ------------------------------------------------------------------------------------------------
# advantages


def our_advantages(name: str, b: Batch) -> np.ndarray[Any, Any]:
    """[T]"""
    inputs = AdvantageInputs(
        keys=b.keys,
        offsets=b.offsets,
        mask=b.mask,
        scores=b.scores,
        token_rewards=None if name == "gdpo" else b.penalty,
        values=b.values,
        old_log_probs=b.old,
        sum_pi_squared=b.squares,
        reward_baselines=b.parts[:, 0],
        reward_components=b.parts,
        component_weights=np.array([1.0, 0.5]),
        gamma=0.97,
        lam=0.9,
    )
    return ADVANTAGE_ESTIMATORS.get(name).estimate(inputs)[0]


def verl_advantages(core: Any, name: str, b: Batch) -> np.ndarray[Any, Any]:
    """[T]"""
    algorithm = importlib.import_module("verl.trainer.config").AlgoConfig
    settings = algorithm(gamma=0.97, lam=0.9, gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
    mask, index = b.padded_mask, np.array(b.uids, dtype=object)
    common: dict[str, Any] = {"token_level_rewards": b.rewards, "response_mask": mask}
    if name == "gae":
        common |= {"values": b.pad(b.values), "gamma": 0.97, "lam": 0.9}
    elif name == "remax":
        common |= {"reward_baselines": torch.tensor(b.parts[:, 0])}
    elif name == "reinforce_plus_plus":
        common |= {"config": settings}
    else:
        common |= {"index": index}
    if name == "gdpo":
        attention = torch.arange(mask.shape[1])[None] < torch.tensor(b.lengths)[:, None]
        prompts = torch.ones((len(b.uids), 1), dtype=torch.int64)
        common |= {"config": settings, "non_tensor_batch": {"a": b.parts[:, 0], "b": b.parts[:, 1]}}
        common |= {"batch": {"prompts": prompts, "attention_mask": torch.cat([prompts.bool(), attention], 1)}}
    if name == "optimal_token_baseline":
        name = (
            "tir_optimal_token_baseline"  # theirs for observation tokens; equal to optimal_token_baseline without them
        )
        common |= {"old_log_probs": b.pad(b.old), "sum_pi_squared": b.pad(b.squares)}
    if name == "grpo_passk":
        common |= {"config": settings}
    if name == "dr_grpo":
        name = "grpo"
        common |= {"norm_adv_by_std_in_grpo": False}
    return b.flat(core.get_adv_estimator_fn(name)(**common)[0] * mask)


# ------------------------------------------------------------------------------------------------
# losses


def chosen_tokens(name: str, b: Batch) -> np.ndarray[Any, Any]:
    """The tokens both choose if verl uses the micro-batch's current log-probs too."""
    chosen = np.zeros(b.mask.size, bool)
    a, log_p = b.adv[b.mask], b.log_prob[b.mask]
    if name == "kl_cov":
        chosen[np.flatnonzero(b.mask)] = kl_cov_tokens(a, log_p, ratio=0.1)
    if name == "clip_cov":
        rng = np.random.default_rng(0)
        chosen[np.flatnonzero(b.mask)] = clip_cov_tokens(a, log_p, ratio=1.0, low=0.2, high=5.0, rng=rng)
    return chosen


Loss = tuple[float, np.ndarray[Any, Any], dict[str, float]]
"""Aggregated loss, its gradient [T], and metrics."""


def our_loss(name: str, mode: str, b: Batch, weights: np.ndarray[Any, Any]) -> Loss:
    """Our result."""
    log_prob = torch.tensor(b.log_prob, requires_grad=True)
    config = ActorConfig(
        clip_ratio_low=LOW, clip_ratio_high=HIGH, tau_neg=1.5, policy_loss=PolicyLossConfig(ppo_kl_coef=0.1)
    )
    inputs = LossInputs(
        log_prob=log_prob,
        old_log_prob=torch.tensor(b.old),
        advantages=torch.tensor(b.adv),
        mask=torch.tensor(b.mask),
        row=torch.tensor(b.row),
        rows=len(b.uids),
        config=config,
        chosen=torch.tensor(chosen_tokens(name, b)),
    )
    out = POLICY_LOSSES.get(name).load()(inputs)
    per_token = out.loss * torch.tensor(weights)
    loss = aggregate(per_token, inputs.mask, inputs.row, inputs.rows, b.counts, mode, SCALE)
    loss.backward()
    report = {"ppo_kl": -inputs.log_ratio().detach(), **out.metrics}
    metrics = {f"actor/{name}": value[inputs.mask].double().mean().item() for name, value in report.items()}
    return loss.item(), log_prob.grad.numpy(), metrics  # type: ignore[union-attr]


def verl_loss(core: Any, name: str, mode: str, b: Batch, weights: np.ndarray[Any, Any]) -> Loss:
    """verl's result."""
    workers = importlib.import_module("verl.workers.config")
    settings = workers.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=3.0,
        tau_pos=1.0,
        tau_neg=1.5,
        policy_loss=workers.PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.2, kl_cov_ratio=0.1, ppo_kl_coef=0.1),
    )
    settings.global_batch_info.update(loss_scale_factor=SCALE)
    log_prob = b.pad(b.log_prob).requires_grad_()
    loss, metrics = core.get_policy_loss_fn(name)(
        old_log_prob=b.pad(b.old),
        log_prob=log_prob,
        advantages=b.pad(b.adv),
        response_mask=b.padded_mask,
        loss_agg_mode=mode,
        config=settings,
        rollout_is_weights=b.pad(weights),
    )
    loss.backward()
    return loss.item(), b.flat(log_prob.grad), metrics  # type: ignore[arg-type]


OTHER_METRICS = {("clip_cov", "actor/pg_clipfrac"), ("kl_cov", "actor/ppo_kl")}
"""The two report another quantity under the same name for these losses."""


NOT_IN_VERL = {"maxrl", "lite_ppo", "gigpo", "rae", "raft", "opd", "dro", "kimi_k15", "topr", "luspo", "vespo"}
"""Estimators and losses that verl 0.9.1 does not have."""


def loss_pairs(core: Any, batches: list[Batch]) -> dict[str, float]:
    """Largest difference of each loss over all aggregations: values, gradients, metrics."""
    out: dict[str, float] = {}
    for name in POLICY_LOSSES.names():
        if name in NOT_IN_VERL:
            continue
        own = name in ("geo_mean", "sapo")  # there verl knows one aggregation only
        modes = ("seq-mean-token-mean",) if own else LOSS_AGG_MODES
        for b in batches:
            row_weights = np.random.default_rng(0).uniform(0.5, 1.5, len(b.uids))[b.row]
            for mode in modes:
                ours, theirs = our_loss(name, mode, b, row_weights), verl_loss(core, name, mode, b, row_weights)
                values = 0.0 if name == "clip_cov" else abs(ours[0] - theirs[0])
                worst = max(values, float(np.abs(ours[1] - theirs[1]).max()))
                out[f"loss {name}"] = max(out.get(f"loss {name}", 0.0), worst)
                both = {key for key in ours[2].keys() & theirs[2].keys() if (name, key) not in OTHER_METRICS}
                apart = [abs(ours[2][key] - theirs[2][key]) for key in both]
                out["loss metrics"] = max([out.get("loss metrics", 0.0), *apart])
    return out


# ------------------------------------------------------------------------------------------------
# the rest


def correction_pairs(helper: Any, b: Batch) -> dict[str, float]:
    """Weights, masks and metrics of the rollout correction."""
    out: dict[str, float] = {}
    rows, log_ratio = MaskedRows.of(b.mask, b.offsets), b.old - b.rollout
    mask = b.padded_mask
    for level in ("token", "sequence"):
        for bounds in ("1.2", "0.8_1.2"):
            for normalize in (False, True):
                weights, metrics = importance_weights(
                    log_ratio, rows, level, parse_bounds(bounds, ""), normalize=normalize
                )
                theirs, their_metrics = helper.compute_rollout_correction_weights(
                    b.pad(log_ratio), mask, level, bounds, normalize
                )
                name = f"correction weights {level} {'mask' if '_' in bounds else 'truncate'}"
                out[name] = max(out.get(name, 0.0), float(np.abs(weights - b.flat(theirs)).max()))
                shared = (metrics.keys() & their_metrics.keys()) - SEQUENCE_EXTREMES
                out["correction metrics of weights"] = max(
                    out.get("correction metrics of weights", 0.0), *(abs(metrics[k] - their_metrics[k]) for k in shared)
                )
    for criterion in helper.SUPPORTED_ROLLOUT_RS_OPTIONS:
        threshold = "0.9_1.15" if criterion.endswith("k1") else "0.03"
        kept, metrics = reject(log_ratio, rows, parse_rejections([criterion], [threshold], ""))
        theirs, their_metrics = helper.compute_rollout_rejection_mask(b.pad(log_ratio), mask, criterion, threshold)
        out[f"correction reject {criterion}"] = float(np.abs(kept - b.flat(theirs)).max())
        out["correction metrics of rejection"] = max(
            out.get("correction metrics of rejection", 0.0),
            *(abs(metrics[k] - their_metrics[k]) for k in metrics.keys() & their_metrics.keys()),
        )
    ours, theirs = (
        offpolicy_metrics(b.old, b.rollout, rows),
        helper.compute_offpolicy_metrics(b.pad(b.old), b.pad(b.rollout), mask),
    )
    out["correction metrics off-policy"] = max(abs(ours[k] - theirs[k]) for k in theirs)
    return out


SEQUENCE_EXTREMES = {"rollout_is_max", "rollout_is_min"}
"""verl reports untruncated weights of sequences; ours are of the weights in use."""


def other_pairs(core: Any, b: Batch) -> dict[str, float]:
    """Aggregation, divergences, value loss, controller."""
    out: dict[str, float] = {}
    flat, mask, row = torch.tensor(b.token), torch.tensor(b.mask), torch.tensor(b.row)
    for mode in LOSS_AGG_MODES:
        ours = aggregate(flat, mask, row, len(b.uids), b.counts, mode, SCALE)
        theirs = core.agg_loss(b.pad(b.token), b.padded_mask, mode, loss_scale_factor=SCALE)
        out[f"aggregate {mode}"] = abs(ours.item() - theirs.item())
    for kind in (*KL_LOSSES, "kl", "mse", "low_var_kl"):
        a, c = (torch.tensor(b.log_prob, requires_grad=True) for _ in range(2))
        ours, theirs = kl_loss(a, torch.tensor(b.rollout), kind), core.kl_penalty(c, torch.tensor(b.rollout), kind)
        (ours.sum() + theirs.sum()).backward()
        worst = max((ours - theirs).abs().max().item(), (a.grad - c.grad).abs().max().item())  # type: ignore[operator]
        out[f"kl {kind}"] = worst
    ours, clipped = value_loss(torch.tensor(b.values), torch.tensor(b.token), torch.tensor(b.adv), 0.5)
    ours = aggregate(ours, mask, row, len(b.uids), b.counts, "token-mean")
    theirs, share = core.compute_value_loss(b.pad(b.values), b.pad(b.adv), b.pad(b.token), b.padded_mask, 0.5)
    out["value loss"] = abs(ours.item() - theirs.item())
    out["value clipfrac"] = abs(clipped[mask].double().mean().item() - float(share))
    controller = core.AdaptiveKLController(0.3, 0.1, 1000)
    controller.update(0.11, 64)
    out["kl controller"] = abs(adaptive_kl_coef(0.3, 0.11, target=0.1, horizon=1000, sequences=64) - controller.value)
    return out


# ------------------------------------------------------------------------------------------------
# differences


def single(name: str, scores: list[float], keys: list[RowKey], mask: list[bool] | None = None) -> list[float]:
    """Our advantages of rows of one token each."""
    n = len(scores)
    inputs = AdvantageInputs(
        keys=keys,
        offsets=np.arange(n + 1),
        mask=np.array(mask if mask is not None else [True] * n),
        scores=np.array(scores),
        norm_by_std=False,
        values=np.zeros(n),
    )
    return ADVANTAGE_ESTIMATORS.get(name).estimate(inputs)[0].round(6).tolist()


def verl_single(
    core: Any, name: str, scores: list[float], uids: list[str], mask: list[bool] | None = None
) -> list[float]:
    """verl's advantages of the same rows."""
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    flags = torch.ones_like(rewards) if mask is None else torch.tensor(mask, dtype=torch.float64)[:, None]
    extra = {"norm_adv_by_std_in_grpo": False} if name == "grpo" else {}
    out, _ = core.get_adv_estimator_fn(name)(rewards, flags, np.array(uids, dtype=object), **extra)
    return [round(x, 6) for x in out[:, 0].tolist()]


def differences(core: Any, helper: Any) -> list[tuple[str, str, Any, Any]]:
    """(what, why, ours, verl's) where the two differ on purpose."""
    a = [RowKey("a", 0), RowKey("a", 1), RowKey("a", 2)]
    out: list[tuple[str, str, Any, Any]] = [
        (
            "grpo, group of one",
            "verl takes mean 0 and std 1, so the raw score becomes the advantage; ours is 0, there is nothing to compare with",
            single("grpo", [5.0], a[:1]),
            verl_single(core, "grpo", [5.0], ["a"]),
        ),
        (
            "rloo, a session of two trajectories",
            "verl counts it twice in its group's baseline (only its trainer's special case for grpo does not); ours once, by its last score",
            single("rloo", [1.0, 1.0, 0.0], [RowKey("a", 0, 0), RowKey("a", 0, 1), RowKey("a", 1)]),
            verl_single(core, "rloo", [1.0, 1.0, 0.0], ["a"] * 3),
        ),
        (
            "grpo, a rejected row",
            "verl lets a row without tokens shift the mean of its siblings (its PR #6452); ours does not see it",
            single("grpo", [1.0, 0.0, 100.0], a, [True, True, False]),
            verl_single(core, "grpo", [1.0, 0.0, 100.0], ["a"] * 3, [True, True, False]),
        ),
        (
            "gpg, alpha",
            "the paper's alpha = B / (B - M) leaves out sessions of groups that teach nothing; verl divides by the number of nonzero scores, "
            "so it depends on where the zero of the score lies",
            single("gpg", [1.0, 2.0, 2.0, 2.0], [*a[:2], RowKey("b", 0), RowKey("b", 1)]),
            verl_single(core, "gpg", [1.0, 2.0, 2.0, 2.0], ["a", "a", "b", "b"]),
        ),
    ]
    b = Batch(0)
    b.mask[b.offsets[1:] - 1] = False  # each response ends with a token of the environment
    out.append(
        (
            "reinforce_plus_plus, score on an observation token",
            "verl drops the reward of a token the policy did not make: here all scores; ours gives it to the token before (sum of |advantage|)",
            round(float(np.abs(our_advantages("reinforce_plus_plus", b)).sum()), 4),
            round(float(np.abs(verl_advantages(core, "reinforce_plus_plus", b)).sum()), 4),
        )
    )
    b, c, ones = Batch(1), Batch(0), np.ones(Batch(1).mask.size)
    out.append(
        (
            "sapo, loss_agg_mode=token-mean",
            "verl always averages by seq-mean-token-mean, whatever is set; ours does what is set",
            round(our_loss("sapo", "token-mean", b, ones)[0], 6),
            round(verl_loss(core, "sapo", "token-mean", b, ones)[0], 6),
        )
    )
    out.append(
        (
            "clip_cov, value",
            "a chosen token that PPO clips anyway keeps its (constant) loss in verl, and has none in ours; gradients are equal",
            round(our_loss("clip_cov", "token-mean", c, np.ones(c.mask.size))[0], 6),
            round(verl_loss(core, "clip_cov", "token-mean", c, np.ones(c.mask.size))[0], 6),
        )
    )
    once = np.ones(c.mask.size)
    ours, theirs = our_loss("clip_cov", "token-mean", c, once)[2], verl_loss(core, "clip_cov", "token-mean", c, once)[2]
    out.append(
        (
            "clip_cov, actor/pg_clipfrac",
            "the same tokens: verl chooses among those that PPO does not clip, ours among all, and counts what it chose",
            round(ours["actor/pg_clipfrac"], 6),
            round(theirs["actor/pg_clipfrac"], 6),
        )
    )
    ours_kl, theirs_kl = (
        our_loss("kl_cov", "token-mean", c, once)[2],
        verl_loss(core, "kl_cov", "token-mean", c, once)[2],
    )
    out.append(
        (
            "kl_cov, actor/ppo_kl",
            "verl reports the mean of |log r| under this name for kl_cov alone; ours the mean of -log r, as for every loss",
            round(ours_kl["actor/ppo_kl"], 6),
            round(theirs_kl["actor/ppo_kl"], 6),
        )
    )
    out.append(
        (
            "geo_mean, two micro-batches",
            "verl averages over each micro-batch, so their sum is twice the loss; ours divides by the mini-batch (whole, then in two)",
            [round(our_loss("geo_mean", "seq-mean-token-mean", b, ones)[0], 6)] * 2,
            [round(x, 6) for x in geo_mean_split(core, b)],
        )
    )
    far = torch.tensor([-12.0]), torch.tensor([-1.0])
    out.append(
        (
            "k3 of a far token",
            "verl cuts the value at 10, and its gradient with it; ours bounds the log-ratio at 20 alone",
            round(kl_loss(*far, "k3").item(), 2),
            round(core.kl_penalty(*far, "k3").item(), 2),
        )
    )
    b.mask[: b.offsets[1]] = False
    out.append(
        (
            "rollout_corr/training_ppl with one row masked as a whole",
            "verl counts such rows (padding, rejected) with perplexity 1 (its issue #7771); ours looks at rows with tokens only",
            round(offpolicy_metrics(b.old, b.rollout, MaskedRows.of(b.mask, b.offsets))["training_ppl"], 6),
            round(helper.compute_offpolicy_metrics(b.pad(b.old), b.pad(b.rollout), b.padded_mask)["training_ppl"], 6),
        )
    )
    out.append(
        (
            "kl_cov, tokens chosen whole and in two micro-batches",
            "verl chooses within each micro-batch from its current log-probs, so a split changes the loss; ours once per step over the batch",
            "chosen beside the data, before any split",
            [round(x, 6) for x in kl_cov_split(core, Batch(1))],
        )
    )
    return out


def _halves(b: Batch) -> list[slice]:
    cut = len(b.uids) // 2
    return [slice(0, cut), slice(cut, len(b.uids))]


def geo_mean_split(core: Any, b: Batch) -> list[float]:
    """verl's loss of the whole mini-batch, and the sum over its halves."""
    return [
        verl_part(core, "geo_mean", b, slice(None)),
        sum(verl_part(core, "geo_mean", b, part) for part in _halves(b)),
    ]


def kl_cov_split(core: Any, b: Batch) -> list[float]:
    """The same for kl_cov."""
    return [verl_part(core, "kl_cov", b, slice(None)), sum(verl_part(core, "kl_cov", b, part) for part in _halves(b))]


def verl_part(core: Any, name: str, b: Batch, part: slice) -> float:
    """verl's loss of some rows, normalized by the sizes of the whole batch."""
    workers = importlib.import_module("verl.workers.config")
    settings = workers.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        policy_loss=workers.PolicyLossConfig(kl_cov_ratio=0.1),
    )
    settings.global_batch_info.update(batch_num_tokens=b.counts.tokens, global_batch_size=b.counts.sequences, dp_size=1)
    columns = [b.pad(x)[part] for x in (b.old, b.log_prob, b.adv)]
    loss, _ = core.get_policy_loss_fn(name)(*columns, b.padded_mask[part], "token-mean", settings)
    return loss.item()


# ------------------------------------------------------------------------------------------------
# main


def compare(core: Any, helper: Any, batches: list[Batch]) -> dict[str, float]:
    """Largest difference of every pair over all batches."""
    worst: dict[str, float] = {}

    def note(found: dict[str, float]) -> None:
        for name, value in found.items():
            worst[name] = max(worst.get(name, 0.0), value)

    checks: list[Callable[[Batch], dict[str, float]]] = [
        lambda b: {
            f"advantage {n}": float(np.abs(our_advantages(n, b) - verl_advantages(core, n, b)).max())
            for n in ADVANTAGE_ESTIMATORS.names()
            if n not in NOT_IN_VERL
        },
        lambda b: correction_pairs(helper, b),
        lambda b: other_pairs(core, b),
    ]
    for b in batches:
        for check in checks:
            note(check(b))
    note(loss_pairs(core, batches))
    return worst


def main() -> int:
    """Install, compare, print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where verl is installed already, or shall stay")
    parser.add_argument("--smoke", action="store_true", help="5 batches, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.batches = 5
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "verl").exists():
            install = ["uv", "pip", "install", "--quiet", "--target", str(folder), "--no-deps", *VERL]
            subprocess.run(install, check=True, timeout=600)
        sys.path.append(str(folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            core = importlib.import_module("verl.trainer.ppo.core_algos")
            helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
            worst = compare(core, helper, [Batch(seed) for seed in range(arguments.batches)])
            explained = differences(core, helper)
    print(f"{'pair':<44} largest difference over {arguments.batches} batches")
    for name, value in worst.items():
        print(f"{name:<44} {value:.1e}{'' if value <= TOLERANCE else '   UNEXPLAINED'}")
    print("\nwhere they differ, and why")
    for what, why, ours, theirs in explained:
        print(f"* {what}: ours {ours}, verl {theirs}{'   BUT THEY AGREE' if ours == theirs else ''}\n  {why}")
    rows = [{"pair": name, "largest_difference": value} for name, value in worst.items()]
    if not arguments.smoke:
        print(write_result("parity_verl", command_line(), rows))
    failed = [name for name, value in worst.items() if not value <= TOLERANCE]
    return int(bool(failed) or any(ours == theirs for _, _, ours, theirs in explained))


if __name__ == "__main__":
    sys.exit(main())
