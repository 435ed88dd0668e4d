"""Options of how advantages come from rewards."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, group, option, require
from rl_trainer.config.kl import KL_PENALTIES, kl_name
from rl_trainer.config.rollout_correction import RolloutCorrectionConfig

KL_CONTROLLERS = ("fixed", "adaptive")


ANSWER = "{answer}"
"""Stands for the data's answer in `AlgorithmConfig.teacher_context`."""


FILTER_METRICS = ("acc", "score")


OLD_LOG_PROBS = ("auto", "recompute", "rollout", "interpolate")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(Options):
    """The weight of the KL divergence in the reward."""

    type: str = option(
        "fixed",
        "fixed; or adaptive: grows while the divergence is above target_kl, shrinks while it is below",
        choices=KL_CONTROLLERS,
        verl=".",
    )
    kl_coef: float = option(0.001, "weight of the divergence in the reward (adaptive: the first one)", ge=0, verl=".")
    target_kl: float = option(0.1, "adaptive: wanted divergence, nats per token", gt=0, needs="type=adaptive", verl=".")
    horizon: int = option(
        10000,
        "adaptive: responses over which the weight changes by at most 20 %",
        ge=1,
        needs="type=adaptive",
        verl=".",
    )


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig(Options):
    """Dynamic sampling (DAPO, arXiv:2503.14476).

    Trains on prompts whose responses differ, and generates more until there are enough.
    """

    enable: bool = option(
        False, "leave out prompts whose responses all score alike, and roll out others in their place", verl="."
    )
    metric: str = option("acc", "what is compared", choices=FILTER_METRICS)
    max_num_gen_batches: int = option(4, "most rounds of generation per step; then it trains on what there is", ge=1)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Options):
    """Soft overlong penalty (DAPO, eq. 13), added to the score."""

    buffer_len: int = option(
        0, "tokens before RolloutConfig.response_length over which the penalty grows; 0: no penalty", ge=0
    )
    penalty_factor: float = option(
        1.0, "maximum penalty, that of a response of full length", ge=0, needs="buffer_len>0"
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Options):
    """How advantages come from rewards."""

    name: str = option("grpo", "algorithm whose defaults apply; algorithm=NAME is short for it", resume="silent")
    adv_estimator: str = option(
        "grpo",
        "advantage estimator",
        plugins="rl_trainer.advantage_estimators",
    )
    rl_coef: float = option(1.0, "weight of the policy loss; 0: none is computed, and no advantages", ge=0)
    sft_coef: float = option(
        0.0,
        "weight of the cross-entropy of the data's own answers; above 0, the last response to each training prompt is its answer, and is "
        "not generated",
        ge=0,
    )
    echo_coef: float = option(
        0.0,
        "weight of the cross-entropy of what tools and environments answer, in the responses of agents: the policy also learns what follows "
        "from its actions",
        ge=0,
    )
    teacher_context: str = option(
        "",
        f"self-distillation: text that the reference policy sees before each prompt and the policy does not; {ANSWER} in it stands for the data's "
        "answer. It may name special tokens of the model, such as those around a system message",
        needs="reads_reference",
    )
    teacher_is_policy: bool = option(
        False,
        "the reference policy is the policy as it is before each update, with teacher_context; false: the initial one",
        needs="teacher_context",
    )
    gamma: float = option(1.0, "discount per token; gigpo: per turn", ge=0, le=1, verl=".")
    lam: float = option(1.0, "lambda of GAE", ge=0, le=1, needs="trains_critic", verl=".")
    norm_adv_by_std_in_grpo: bool = option(
        True, "grpo, grpo_passk, gdpo, gigpo: divide by the standard deviation of the group", verl="."
    )
    gdpo_reward_keys: tuple[str, ...] = option(
        (), "gdpo: names of what the reward function returns, such as score,acc", verl="."
    )
    gdpo_reward_weights: tuple[float, ...] = option((), "gdpo: weights of these; empty: all 1", verl=".")
    gigpo_step_coef: float = option(
        1.0, "gigpo: weight of a turn's advantage, beside that of its session", ge=0, needs="adv_estimator=gigpo"
    )
    rae_decay: float = option(
        0.95,
        "rae: part of a role's mean score that stays when a response is added",
        ge=0,
        lt=1,
        needs="adv_estimator=rae",
    )
    use_kl_in_reward: bool = option(
        False, "subtract the divergence from the reference policy from each token's reward", verl="."
    )
    kl_penalty: str = option("k1", "its estimator: " + ", ".join(KL_PENALTIES), needs="reads_reference", verl=".")
    kl_ctrl: KLControlConfig = group(KLControlConfig, "weight of that divergence", needs="use_kl_in_reward", verl=".")
    old_log_prob: str = option(
        "auto",
        "log-probs that the ratio of the policy loss is to: recompute (a pass of the actor), rollout (those of the rollout engine; the "
        "rollout correction moves into the loss), interpolate (decoupled PPO without that pass: between those of the rollout engine and of "
        "the policy being trained, by the age of the token's weights), or auto (the engine's in each step in which they agree with the actor's)",
        choices=OLD_LOG_PROBS,
    )
    old_log_prob_tolerance: float = option(
        1e-3,
        "auto: largest mean difference between log-probs of rollout engine and actor at which they agree, nats per token",
        gt=0,
        needs="old_log_prob=auto",
    )
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig, "train/rollout mismatch", verl=".")
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "dynamic sampling", needs="enable", verl=".")

    def check(self, path: str) -> None:
        kl_name(self.kl_penalty, KL_PENALTIES, f"{path}kl_penalty")
        require(
            self.use_kl_in_reward or self.kl_ctrl.type == "fixed",
            f"{path}kl_ctrl.type",
            "fixed without use_kl_in_reward=true",
            self.kl_ctrl.type,
        )
        require(
            len(self.component_weights) == len(self.gdpo_reward_keys),
            f"{path}gdpo_reward_weights",
            f"one for each of the {len(self.gdpo_reward_keys)} keys",
            self.component_weights,
        )

    @property
    def component_weights(self) -> tuple[float, ...]:
        """`gdpo_reward_weights`; 1 for each key when empty."""
        return self.gdpo_reward_weights or (1.0,) * len(self.gdpo_reward_keys)
