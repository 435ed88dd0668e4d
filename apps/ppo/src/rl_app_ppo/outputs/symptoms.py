"""Symptoms of a run that goes wrong, in the metrics of its last steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Metrics: TypeAlias = Mapping[str, float]

KEPT = 10
"""Steps that `symptoms` looks at."""
STEPS = 3
"""Steps in a row that must have a symptom of a trend."""
TRUNCATED, GAP, STEP_KL, STARVED, UNEVEN, FAILING = 0.5, 0.05, 0.2, 0.5, 1.5, 0.5
"""Limits: share of truncated responses; mean difference between the probabilities of tokens in the
rollout engine and in the trainer, with weights of the same version; divergence from the policy at
the begin of a step, nats per token; share of an asynchronous step in which the trainer waits for
responses, or the rollout workers for the trainer; response tokens of the busiest rollout worker
over the mean; share of the tool calls that are answered with an error."""
GROWN, SMALL_GAP = 4.0, 0.01
"""Gap over that of the first step, and a gap below which growth does not matter."""
BEYOND = 2.0
"""Divergence from the reference policy over algorithm.kl_ctrl.target_kl."""
COLLAPSED = 0.1
"""Part of the first entropy that is left."""
SPIKE = 20.0
"""Gradient norm over the median of the steps before."""
FEWEST = 5
"""Steps that such a median needs."""


def symptoms(
    first: Metrics,
    last: Sequence[Metrics],
    *,
    tools: bool,
    first_step: bool = False,
    rewarded: bool = True,
    reward: str = "reward.function",
    target_kl: float | None = None,
) -> dict[str, str]:
    """The symptoms by name, each with what it means and the key to check.

    Args:
        first: metrics of the first training step.
        last: those of the last steps, at most KEPT, the newest last.
        tools: the session has tools.
        first_step: the newest step is the first one of the run.
        rewarded: the policy learns from the rewards of several responses.
        reward: the setting of rewards, and where their functions are.
        target_kl: algorithm.kl_ctrl.target_kl, nats per token; None: there is no target.
    """
    found = _of_step(last[-1], tools=tools) | _of_gradients(last)
    if rewarded and (equal := _of_rewards(last, first_step=first_step, reward=reward)):
        found = equal | found
        found.pop("gradient", None)  # zero for that reason
    if len(last) >= STEPS:
        newest = last[-STEPS:]
        found = _of_trends(first, newest) | _of_waiting(newest) | _of_divergence(newest, target_kl) | found
    if failing := _of_tool_calls(last):
        found = failing | found
    return found


def _of_rewards(last: Sequence[Metrics], *, first_step: bool, reward: str) -> dict[str, str]:
    """Rewards that do not tell responses apart.

    One step shows it if its advantages are all zero. Otherwise, as with a critic or with baselines
    across prompts, it takes the first step of a run, or several in a row.
    """
    newest = last[-1]
    same = [_all_scores_equal(metrics) for metrics in last]
    nothing = newest.get("critic/score/equal_groups") == 1.0 and _no_advantages(newest)
    always = same[-1] and (first_step or (len(last) >= STEPS and all(same[-STEPS:])))
    if not nothing and not always:
        return {}
    what = (
        f"every response has the reward {newest['critic/score/min']:g}"
        if same[-1]
        else "the responses to each prompt all have the same reward"
    )
    return {
        "equal rewards": (
            f"{what}, so there is nothing to learn from; look at {reward} and at the responses (rl samples RUN --train), and raise rollout.n or "
            "rollout.temperature"
        )
    }


def _of_step(metrics: Metrics, *, tools: bool) -> dict[str, str]:
    """What one step shows."""
    found: dict[str, str] = {}
    if metrics.get("response_length/truncated_ratio") == 1.0:
        found["truncation"] = (
            "every response was cut off at rollout.response_length; raise it, or see that the model ends with its end-of-sequence token"
        )
    if metrics.get("actor/grad_norm") == 0.0:
        found["gradient"] = (
            "the gradient of the policy is zero (actor/grad_norm), so its weights do not change; look at reward.function and "
            "algorithm.adv_estimator"
        )
    if skipped := metrics.get("actor/skipped_steps"):
        advice = "lower actor.optim.lr, and look at the rewards of this step and at the weights in model.path"
        if not math.isfinite(metrics.get("critic/advantages/mean", 0.0)):
            advice = "the advantages are not finite (critic/advantages/mean): look at algorithm.adv_estimator and at the rewards of this step"
        found["skipped updates"] = (
            f"{skipped:.0f} mini-batch{'' if skipped == 1 else 'es'} had a gradient that is not finite and changed no weight (actor/skipped_steps); "
            + advice
        )
    if skipped := metrics.get("critic/skipped_steps"):
        found["skipped critic updates"] = (
            f"{skipped:.0f} mini-batch{'' if skipped == 1 else 'es'} of the critic had a gradient that is not finite and changed no weight "
            "(critic/skipped_steps); lower critic.optim.lr, and look at the rewards of this step"
        )
    if damaged := metrics.get("transfer_queue/damaged_blocks"):
        found["damaged memory"] = (
            f"{damaged:.0f} blocks of the data plane were damaged in memory, and read again from the journal (transfer_queue.verify); "
            "check the memory of this host, and what else writes to /dev/shm"
        )
    if tools and metrics.get("agent/tool_calls/max") == 0.0:
        found["tools"] = (
            "no response called a tool; look at rollout.session, and at whether the prompt tells the model how to call one"
        )
    return found


def _of_tool_calls(last: Sequence[Metrics]) -> dict[str, str]:
    """Calls that are answered with an error: all of a step, or many in several steps in a row."""
    shares = [
        metrics.get("agent/tool_errors/mean", 0.0) / calls if (calls := metrics.get("agent/tool_calls/mean")) else 0.0
        for metrics in last[-STEPS:]
    ]
    if shares[-1] < 1.0 and (len(shares) < STEPS or min(shares) < FAILING):
        return {}
    return {
        "tool errors": (
            f"{shares[-1]:.0%} of the tool calls were answered with an error (agent/tool_errors); the responses have its text "
            "(rl samples RUN --train --json): see whether the policy writes wrong calls, or a tool or its server fails"
        )
    }


def _of_gradients(last: Sequence[Metrics]) -> dict[str, str]:
    """A gradient norm far above those of the steps before."""
    norms = [norm for metrics in last if math.isfinite(norm := metrics.get("actor/grad_norm", math.nan))]
    if len(norms) <= FEWEST or norms[-1] != last[-1].get("actor/grad_norm"):
        return {}
    usual = statistics.median(norms[:-1])
    if not norms[-1] > SPIKE * usual > 0:
        return {}
    return {
        "gradient spike": (
            f"the gradient norm is {norms[-1]:.3g}, {norms[-1] / usual:.0f} times the median of the {len(norms) - 1} steps before "
            "(actor/grad_norm); lower actor.optim.lr or actor.optim.grad_clip, and look at the responses of this step (rl samples RUN --train)"
        )
    }


def _of_trends(first: Metrics, last: Sequence[Metrics]) -> dict[str, str]:
    """What each of the last steps shows."""
    found: dict[str, str] = {}

    def in_all(name: str, seen: Callable[[float], bool]) -> bool:
        return all(name in metrics and seen(metrics[name]) for metrics in last)

    newest = last[-1]
    if in_all("response_length/truncated_ratio", lambda share: share >= TRUNCATED):
        found["truncation"] = (
            f"{newest['response_length/truncated_ratio']:.0%} of the responses were cut off at rollout.response_length, "
            f"and so were at least {TRUNCATED:.0%} in each of the last {STEPS} steps; raise it, or penalize long responses (reward.overlong)"
        )
    fresh = in_all("training/off_policy/trajectory_staleness_worst/max", lambda age: age == 0)
    if fresh and in_all("training/rollout_probs_diff_mean", lambda gap: gap > GAP):
        found["log-prob gap"] = (
            f"the rollout engine and the trainer differ by {newest['training/rollout_probs_diff_mean']:.2f} in the mean probability of a token, "
            "with the same weights (training/rollout_probs_diff_mean); look at rollout.dtype, the trainer's dtype and "
            "algorithm.rollout_correction"
        )
    least = max(SMALL_GAP, GROWN * first.get("training/rollout_probs_diff_mean", math.inf))
    if fresh and "log-prob gap" not in found and in_all("training/rollout_probs_diff_mean", lambda gap: gap > least):
        found["log-prob gap"] = (
            f"the difference between rollout engine and trainer in the mean probability of a token grew from "
            f"{first['training/rollout_probs_diff_mean']:.2g} to {newest['training/rollout_probs_diff_mean']:.2g}, with the same weights "
            "(training/rollout_probs_diff_mean); look at rollout.dtype, the trainer's dtype and algorithm.rollout_correction"
        )
    if in_all("actor/ppo_kl", lambda kl: kl > STEP_KL):
        found["step size"] = (
            f"the policy moves {newest['actor/ppo_kl']:.2g} nats per token away from itself within a step (actor/ppo_kl), "
            f"and more than {STEP_KL:g} in each of the last {STEPS} steps; lower actor.optim.lr or actor.ppo_epochs"
        )
    entropy = first.get("actor/entropy", 0.0)
    before = first.get("critic/score/mean", 0.0)
    collapsed = in_all("actor/entropy", lambda left: left < COLLAPSED * entropy)
    if collapsed and in_all("critic/score/mean", lambda score: score <= before):
        found["entropy"] = (
            f"the entropy of the policy fell from {entropy:.2g} to {newest['actor/entropy']:.2g} and the reward has not risen, so its responses "
            "hardly differ; lower actor.optim.lr, or raise actor.entropy_coeff or actor.kl_loss_coef"
        )
    return found


def _of_waiting(last: Sequence[Metrics]) -> dict[str, str]:
    """Workers that wait for others in each of the last steps.

    Trainer and rollout take turns in a synchronous run, so there only rollout workers that wait for
    one of them count.
    """
    found: dict[str, str] = {}
    asynchronous = all("async/admitted" in metrics for metrics in last)
    trainer, rollout = (_shares_of_step(last, f"idle/{role}/starved") for role in ("trainer", "rollout"))
    if asynchronous and min(trainer) > STARVED:
        found["starved trainer"] = (
            f"the trainer waits for responses in {trainer[-1]:.0%} of the step (idle/trainer/starved); raise rollout.num_workers or "
            "async_rl.max_staleness, or set async_rl.on_update=continue or async_rl.order=ready_first"
        )
    if asynchronous and min(rollout) > STARVED:
        found["idle rollout"] = (
            f"the rollout workers wait for the trainer in {rollout[-1]:.0%} of the step (idle/rollout/starved), because training is slower than "
            "generation; lower rollout.num_workers and raise fsdp.world_size, or raise actor.ppo_max_token_len"
        )
    uneven = [metrics.get("rollout/imbalance", 1.0) for metrics in last]
    if min(uneven) > UNEVEN:
        found["uneven rollout"] = (
            f"one rollout worker generates {uneven[-1]:.1f} times as many tokens as the mean, and the others wait for it (rollout/imbalance); set "
            "rollout.router=least_loaded, or raise data.train_batch_size"
        )
    return found


def _shares_of_step(last: Sequence[Metrics], name: str) -> list[float]:
    """These seconds in the time of each step; 0 where a step has no time."""
    return [metrics.get(name, 0.0) / step if (step := metrics.get("timing_s/step", 0.0)) else 0.0 for metrics in last]


def _of_divergence(last: Sequence[Metrics], target: float | None) -> dict[str, str]:
    """A divergence from the reference policy that the adaptive weight does not hold."""
    far = [metrics.get("actor/reward_kl_penalty", 0.0) for metrics in last]
    if target is None or min(far) <= BEYOND * target:
        return {}
    return {
        "divergence": (
            f"the policy is {far[-1]:.2g} nats per token away from the reference policy (actor/reward_kl_penalty), more than "
            f"{BEYOND:g} times algorithm.kl_ctrl.target_kl={target:g} in each of the last {STEPS} steps; raise algorithm.kl_ctrl.kl_coef, or "
            "lower algorithm.kl_ctrl.horizon or actor.optim.lr"
        )
    }


def _no_advantages(metrics: Metrics) -> bool:
    return metrics.get("critic/advantages/max") == 0.0 == metrics.get("critic/advantages/min")


def _all_scores_equal(metrics: Metrics) -> bool:
    lowest = metrics.get("critic/score/min")
    return lowest is not None and lowest == metrics.get("critic/score/max")
