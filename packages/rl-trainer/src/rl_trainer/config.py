"""Settings of the trainer's parts. Each class is checked when built; messages name the key to set.

Every field carries its help text in `metadata["help"]`; the app lists them. Types are plain so that any YAML reader can fill them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.algorithms.batching import Schedule
from rl_trainer.algorithms.correction import (
    IS_LEVELS,
    RS_CRITERIA,
    Bounds,
    Rejection,
    parse_bounds,
    parse_rejections,
)
from rl_trainer.algorithms.kl import KL_LOSSES, KL_PENALTIES, kl_name
from rl_trainer.algorithms.policy_losses import LOSS_AGG_MODES
from rl_trainer.algorithms.schedules import LR_SCHEDULES
from rl_trainer.routing import ROUTERS
from rl_trainer.settings import group, option, require

KL_CONTROLLERS = ("fixed", "adaptive")
FILTER_METRICS = ("acc", "score")
CRITIC_AGG_MODES = tuple(mode for mode in LOSS_AGG_MODES if mode != "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-6, "learning rate of AdamW")
    weight_decay: float = option(0.01, "decoupled weight decay of AdamW")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.999, "decay of the second moment")
    lr_warmup_steps: int = option(0, "optimizer steps over which lr rises linearly from 0")
    lr_scheduler_type: str = option("constant", "what lr does after the rise: " + ", ".join(LR_SCHEDULES))
    lr_decay_steps: int = option(0, "linear, cosine: optimizer step at which lr has fallen to its least")
    min_lr_ratio: float = option(0.0, "linear, cosine: that least, as a share of lr")
    grad_clip: float = option(1.0, "largest global gradient norm")

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", "greater than 0", self.lr)
        require(self.weight_decay >= 0, "optim.weight_decay", "at least 0", self.weight_decay)
        require(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "optim.beta1 and optim.beta2",
            "in [0, 1)",
            (self.beta1, self.beta2),
        )
        require(self.lr_warmup_steps >= 0, "optim.lr_warmup_steps", "at least 0", self.lr_warmup_steps)
        require(self.grad_clip > 0, "optim.grad_clip", "greater than 0", self.grad_clip)
        decays = self.lr_scheduler_type != "constant"
        require(
            self.lr_scheduler_type in LR_SCHEDULES,
            "optim.lr_scheduler_type",
            f"one of {LR_SCHEDULES}",
            self.lr_scheduler_type,
        )
        require(
            self.lr_decay_steps > self.lr_warmup_steps if decays else self.lr_decay_steps == 0,
            "optim.lr_decay_steps",
            f"greater than lr_warmup_steps ({self.lr_warmup_steps}) with linear or cosine, and 0 with constant",
            self.lr_decay_steps,
        )
        require(
            0 <= self.min_lr_ratio <= 1 and (decays or self.min_lr_ratio == 0),
            "optim.min_lr_ratio",
            "in [0, 1], and 0 with constant",
            self.min_lr_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class CriticOptimConfig(OptimConfig):
    """AdamW of the critic, which learns faster than the policy."""

    lr: float = option(1e-5, "learning rate of AdamW")


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """Which policy loss, and what some of them need."""

    loss_mode: str = option(
        "vanilla",
        "policy loss: vanilla (PPO), gspo, geo_mean (GMPO), cispo, sapo, gpg, clip_cov, kl_cov, dppo_tv, dppo_kl, or an installed one",
    )
    clip_cov_ratio: float = option(0.0002, "clip_cov: share of the tokens that lose their gradient")
    clip_cov_lb: float = option(1.0, "clip_cov: least covariance of such a token")
    clip_cov_ub: float = option(5.0, "clip_cov: largest covariance of such a token")
    kl_cov_ratio: float = option(0.0002, "kl_cov: share of the tokens that pay for leaving the old policy")
    ppo_kl_coef: float = option(0.1, "kl_cov: what they pay, per nat")

    def __post_init__(self) -> None:
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            value: float = getattr(self, name)
            require(0 < value <= 1, f"actor.policy_loss.{name}", "in (0, 1]", value)
        require(
            self.clip_cov_lb < self.clip_cov_ub,
            "actor.policy_loss.clip_cov_lb",
            f"below clip_cov_ub ({self.clip_cov_ub})",
            self.clip_cov_lb,
        )
        require(self.ppo_kl_coef >= 0, "actor.policy_loss.ppo_kl_coef", "at least 0", self.ppo_kl_coef)


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy under training and its loss."""

    optim: OptimConfig = group(OptimConfig, "optimizer of the actor")
    ppo_epochs: int = option(1, "passes over the batch per step")
    ppo_mini_batch_size: int = option(64, "prompts per optimizer step (each brings rollout.n responses)")
    ppo_micro_batch_size: int = option(0, "responses per forward pass; 0: the whole mini-batch")
    ppo_max_token_len: int = option(0, "most tokens per forward pass, prompts included, instead of that; 0: not used")
    use_remove_padding: bool = option(False, "join the sequences of a forward pass end to end instead of padding them")
    policy_loss: PolicyLossConfig = group(PolicyLossConfig, "loss of the policy")
    clip_ratio_low: float = option(
        0.2, "lower clip of the probability ratio: 1 - this (geo_mean: of its logarithm; dppo_*: of the divergence)"
    )
    clip_ratio_high: float = option(
        0.2, "upper clip of the probability ratio: 1 + this (geo_mean: of its logarithm; dppo_*: of the divergence)"
    )
    clip_ratio_c: float = option(
        3.0, "vanilla: bound of the loss where the advantage is negative (dual clip); dppo_*: largest weight of a token"
    )
    tau_pos: float = option(1.0, "sapo: temperature of the gate where the advantage is positive")
    tau_neg: float = option(1.05, "sapo: temperature of the gate elsewhere")
    loss_agg_mode: str = option("token-mean", "how token losses become one number: " + ", ".join(LOSS_AGG_MODES))
    loss_scale_factor: int = option(
        0, "tokens by which seq-mean-token-sum-norm divides, such as rollout.response_length"
    )
    entropy_coeff: float = option(0.0, "weight of the entropy bonus in the loss")
    use_kl_loss: bool = option(False, "add the divergence from the reference policy to the loss")
    kl_loss_coef: float = option(0.001, "weight of that divergence")
    kl_loss_type: str = option(
        "k3", f"its estimator: {', '.join(KL_PENALTIES)}; with + behind it: its value, the gradient of k2"
    )

    def __post_init__(self) -> None:
        require(self.ppo_epochs >= 1, "actor.ppo_epochs", "at least 1", self.ppo_epochs)
        require(self.ppo_mini_batch_size >= 1, "actor.ppo_mini_batch_size", "at least 1", self.ppo_mini_batch_size)
        require(self.ppo_micro_batch_size >= 0, "actor.ppo_micro_batch_size", "at least 0", self.ppo_micro_batch_size)
        require(self.ppo_max_token_len >= 0, "actor.ppo_max_token_len", "at least 0", self.ppo_max_token_len)
        require(
            not (self.ppo_max_token_len and self.ppo_micro_batch_size),
            "actor.ppo_max_token_len",
            f"0 with ppo_micro_batch_size ({self.ppo_micro_batch_size}): forward passes are cut by rows or by tokens",
            self.ppo_max_token_len,
        )
        require(0 < self.clip_ratio_low < 1, "actor.clip_ratio_low", "between 0 and 1", self.clip_ratio_low)
        require(self.clip_ratio_high > 0, "actor.clip_ratio_high", "greater than 0", self.clip_ratio_high)
        require(self.clip_ratio_c > 1, "actor.clip_ratio_c", "greater than 1", self.clip_ratio_c)
        require(
            self.loss_agg_mode in LOSS_AGG_MODES, "actor.loss_agg_mode", f"one of {LOSS_AGG_MODES}", self.loss_agg_mode
        )
        require(
            self.loss_scale_factor >= 1 or self.loss_agg_mode != "seq-mean-token-sum-norm",
            "actor.loss_scale_factor",
            "at least 1 with loss_agg_mode=seq-mean-token-sum-norm, for instance rollout.response_length",
            self.loss_scale_factor,
        )
        require(
            self.tau_pos > 0 and self.tau_neg > 0,
            "actor.tau_pos and actor.tau_neg",
            "greater than 0",
            (self.tau_pos, self.tau_neg),
        )
        require(self.kl_loss_coef >= 0, "actor.kl_loss_coef", "at least 0", self.kl_loss_coef)
        kl_name(self.kl_loss_type, KL_LOSSES, "actor.kl_loss_type")

    def schedule(self, rollout_n: int, seed: int) -> Schedule:
        """How the batch of a step is cut up, with `rollout_n` responses per prompt."""
        return Schedule(epochs=self.ppo_epochs, mini_batch_rows=self.ppo_mini_batch_size * rollout_n, seed=seed)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function (only with algorithm.adv_estimator=gae)."""

    optim: CriticOptimConfig = group(CriticOptimConfig, "optimizer of the critic")
    ppo_epochs: int = option(1, "passes over the batch per step")
    ppo_mini_batch_size: int = option(64, "prompts per optimizer step (each brings rollout.n responses)")
    ppo_micro_batch_size: int = option(0, "responses per forward pass; 0: the whole mini-batch")
    ppo_max_token_len: int = option(0, "most tokens per forward pass, prompts included, instead of that; 0: not used")
    use_remove_padding: bool = option(False, "join the sequences of a forward pass end to end instead of padding them")
    cliprange_value: float = option(0.5, "largest move of a value per step")
    loss_agg_mode: str = option("token-mean", "how token losses become one number: " + ", ".join(CRITIC_AGG_MODES))
    warmup_steps: int = option(0, "first steps in which the critic alone is trained")

    def __post_init__(self) -> None:
        require(self.ppo_epochs >= 1, "critic.ppo_epochs", "at least 1", self.ppo_epochs)
        require(self.ppo_mini_batch_size >= 1, "critic.ppo_mini_batch_size", "at least 1", self.ppo_mini_batch_size)
        require(self.ppo_micro_batch_size >= 0, "critic.ppo_micro_batch_size", "at least 0", self.ppo_micro_batch_size)
        require(self.ppo_max_token_len >= 0, "critic.ppo_max_token_len", "at least 0", self.ppo_max_token_len)
        require(
            not (self.ppo_max_token_len and self.ppo_micro_batch_size),
            "critic.ppo_max_token_len",
            f"0 with ppo_micro_batch_size ({self.ppo_micro_batch_size}): forward passes are cut by rows or by tokens",
            self.ppo_max_token_len,
        )
        require(self.cliprange_value > 0, "critic.cliprange_value", "greater than 0", self.cliprange_value)
        require(
            self.loss_agg_mode in CRITIC_AGG_MODES,
            "critic.loss_agg_mode",
            f"one of {CRITIC_AGG_MODES}",
            self.loss_agg_mode,
        )
        require(self.warmup_steps >= 0, "critic.warmup_steps", "at least 0", self.warmup_steps)

    def schedule(self, rollout_n: int, seed: int) -> Schedule:
        """How the batch of a step is cut up, with `rollout_n` responses per prompt."""
        return Schedule(epochs=self.ppo_epochs, mini_batch_rows=self.ppo_mini_batch_size * rollout_n, seed=seed)


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The weight of the divergence in the reward."""

    type: str = option(
        "fixed", "fixed; or adaptive: grows while the divergence is above target_kl, shrinks while it is below"
    )
    kl_coef: float = option(0.001, "weight of the divergence in the reward (adaptive: the first one)")
    target_kl: float = option(0.1, "adaptive: wanted divergence, nats per token")
    horizon: int = option(10000, "adaptive: responses over which the weight changes by at most 20 %")

    def __post_init__(self) -> None:
        require(self.type in KL_CONTROLLERS, "algorithm.kl_ctrl.type", f"one of {KL_CONTROLLERS}", self.type)
        require(self.kl_coef >= 0, "algorithm.kl_ctrl.kl_coef", "at least 0", self.kl_coef)
        require(self.target_kl > 0, "algorithm.kl_ctrl.target_kl", "greater than 0", self.target_kl)
        require(self.horizon >= 1, "algorithm.kl_ctrl.horizon", "at least 1", self.horizon)


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Correction for rollout engine and trainer being different policies."""

    rollout_is: str = option("", f"importance weights per {', '.join(IS_LEVELS)}; empty: none")
    rollout_is_threshold: str = option("2.0", "largest weight (truncated), or lower_upper: weights outside become 0")
    rollout_is_batch_normalize: bool = option(False, "divide the weights by their mean over the batch")
    rollout_rs: str = option("", f"rejection, comma-separated: {', '.join(RS_CRITERIA)}; empty: none")
    rollout_rs_threshold: str = option(
        "", "its thresholds, one for all or one each; k1: number or lower_upper of the ratio, others: nats"
    )
    bypass_mode: bool = option(
        False,
        "take the rollout engine's log-probs for the old policy's, without the forward pass (correction moves into the loss)",
    )

    def __post_init__(self) -> None:
        key = "algorithm.rollout_correction"
        require(
            self.rollout_is in ("", *IS_LEVELS), f"{key}.rollout_is", f"empty or one of {IS_LEVELS}", self.rollout_is
        )
        require(
            bool(self.rollout_is) or not self.rollout_is_batch_normalize,
            f"{key}.rollout_is_batch_normalize",
            f"false without {key}.rollout_is",
            self.rollout_is_batch_normalize,
        )
        require(
            bool(self.rollout_rs) == bool(self.rollout_rs_threshold),
            f"{key}.rollout_rs_threshold",
            f"set exactly when {key}.rollout_rs is ({self.rollout_rs!r})",
            self.rollout_rs_threshold,
        )
        self.is_bounds()
        self.rejections()

    def is_bounds(self) -> Bounds:
        """`rollout_is_threshold`, parsed."""
        return parse_bounds(self.rollout_is_threshold, "algorithm.rollout_correction.rollout_is_threshold")

    def rejections(self) -> tuple[Rejection, ...]:
        """`rollout_rs` and its thresholds, parsed."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold, "algorithm.rollout_correction.rollout_rs")


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476): train on prompts whose responses differ, and generate more until there are enough."""

    enable: bool = option(
        False, "leave out prompts whose responses all score alike, and roll out others in their place"
    )
    metric: str = option("acc", "what is compared: " + ", ".join(FILTER_METRICS))
    max_num_gen_batches: int = option(4, "most rounds of generation per step; then it trains on what there is")

    def __post_init__(self) -> None:
        key = "algorithm.filter_groups"
        require(self.metric in FILTER_METRICS, f"{key}.metric", f"one of {FILTER_METRICS}", self.metric)
        require(self.max_num_gen_batches >= 1, f"{key}.max_num_gen_batches", "at least 1", self.max_num_gen_batches)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Soft punishment of overlong responses (DAPO, eq. 13), added to the score."""

    buffer_len: int = option(0, "tokens before rollout.response_length in which the punishment grows; 0: none")
    penalty_factor: float = option(1.0, "the punishment of a response of full length")

    def __post_init__(self) -> None:
        require(self.buffer_len >= 0, "reward.overlong.buffer_len", "at least 0", self.buffer_len)
        require(self.penalty_factor >= 0, "reward.overlong.penalty_factor", "at least 0", self.penalty_factor)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How advantages come from rewards."""

    name: str = option("grpo", "algorithm whose defaults apply: algorithm=grpo or algorithm=ppo")
    adv_estimator: str = option(
        "grpo",
        "advantage estimator: gae, grpo, dr_grpo, grpo_passk, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg, gdpo, "
        "optimal_token_baseline, or an installed one",
    )
    gamma: float = option(1.0, "discount per token")
    lam: float = option(1.0, "lambda of GAE")
    norm_adv_by_std_in_grpo: bool = option(
        True, "grpo, grpo_passk, gdpo: divide by the standard deviation of the group"
    )
    gdpo_reward_keys: str = option(
        "", "gdpo: comma-separated names of what the reward function returns, such as score,acc"
    )
    gdpo_reward_weights: str = option("", "gdpo: comma-separated weights of these; empty: all 1")
    use_kl_in_reward: bool = option(False, "subtract the divergence from the reference policy from each token's reward")
    kl_penalty: str = option("k1", "its estimator: " + ", ".join(KL_PENALTIES))
    kl_ctrl: KLControlConfig = group(KLControlConfig, "weight of that divergence")
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig, "train/rollout mismatch")
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "dynamic sampling")

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, "algorithm.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.lam <= 1, "algorithm.lam", "in [0, 1]", self.lam)
        kl_name(self.kl_penalty, KL_PENALTIES, "algorithm.kl_penalty")
        require(
            self.use_kl_in_reward or self.kl_ctrl.type == "fixed",
            "algorithm.kl_ctrl.type",
            "fixed without algorithm.use_kl_in_reward=true",
            self.kl_ctrl.type,
        )
        weights, keys = self.component_weights(), self.component_keys()
        require(
            len(weights) == len(keys), "algorithm.gdpo_reward_weights", f"one for each of the {len(keys)} keys", weights
        )

    def component_keys(self) -> tuple[str, ...]:
        """`gdpo_reward_keys`, parsed."""
        return tuple(name.strip() for name in self.gdpo_reward_keys.split(",") if name.strip())

    def component_weights(self) -> tuple[float, ...]:
        """`gdpo_reward_weights`, parsed; 1 for each key when empty."""
        if not self.gdpo_reward_weights:
            return (1.0,) * len(self.component_keys())
        try:
            return tuple(float(text) for text in self.gdpo_reward_weights.split(","))
        except ValueError:
            raise ConfigError(
                f"algorithm.gdpo_reward_weights must be numbers such as 1.0,0.5; got {self.gdpo_reward_weights!r}."
            ) from None


@dataclass(frozen=True, kw_only=True)
class ValidationSampling:
    """How validation responses are sampled."""

    n: int = option(1, "responses per validation prompt")
    temperature: float = option(0.0, "0: greedy")

    def __post_init__(self) -> None:
        require(self.n >= 1, "rollout.val_kwargs.n", "at least 1", self.n)
        require(self.temperature >= 0, "rollout.val_kwargs.temperature", "at least 0", self.temperature)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    num_workers: int = option(2, "rollout replicas, one process each")
    router: str = option("even", "which replica gets which prompts: " + ", ".join(ROUTERS))
    n: int = option(8, "responses per prompt")
    temperature: float = option(1.0, "divides the logits before sampling")
    top_p: float = option(1.0, "sample from the smallest set of tokens with this much probability")
    top_k: int = option(0, "sample from this many most likely tokens; 0: all")
    response_length: int = option(512, "most tokens per response")
    session: str = option("single_turn", "how a session runs: single_turn, or one installed under rl_trainer.sessions")
    ignore_eos: bool = option(False, "do not stop at the end-of-sequence token")
    max_batch_size: int = option(512, "responses generated side by side in one replica")
    dtype: str = option(
        "float32", "what replicas compute in, float32 or bfloat16; weights are rounded to it before they are sent"
    )
    val_kwargs: ValidationSampling = group(ValidationSampling, "sampling for validation")

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "rollout.num_workers", "at least 1", self.num_workers)
        require(self.router in ROUTERS, "rollout.router", f"one of {ROUTERS}", self.router)
        require(self.n >= 1, "rollout.n", "at least 1", self.n)
        require(
            self.temperature > 0,
            "rollout.temperature",
            "greater than 0 (greedy samples teach nothing)",
            self.temperature,
        )
        require(0 < self.top_p <= 1, "rollout.top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "rollout.top_k", "at least 0", self.top_k)
        require(self.response_length >= 1, "rollout.response_length", "at least 1", self.response_length)
        require(self.max_batch_size >= 1, "rollout.max_batch_size", "at least 1", self.max_batch_size)
        require(self.dtype in ("float32", "bfloat16"), "rollout.dtype", "float32 or bfloat16", self.dtype)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length, pace and seed of a run."""

    total_training_steps: int = option(30, "steps to train; -1: as many as trainer.total_epochs has")
    test_freq: int = option(5, "validate every so many steps; 0: only before and after")
    val_before_train: bool = option(True, "validate before the first step")
    save_freq: int = option(
        10, "save a checkpoint to resume from every so many steps, and after the last; 0: after the last alone"
    )
    seed: int = option(0, "everything random is derived from it")
    stage_timeout_s: float = option(600.0, "longest one stage of a step may take, seconds")

    def __post_init__(self) -> None:
        require(
            self.total_training_steps >= -1, "trainer.total_training_steps", "at least -1", self.total_training_steps
        )
        require(self.test_freq >= 0, "trainer.test_freq", "at least 0", self.test_freq)
        require(self.save_freq >= 0, "trainer.save_freq", "at least 0", self.save_freq)
        require(0 <= self.seed < 2**31, "trainer.seed", "in [0, 2**31)", self.seed)
        require(self.stage_timeout_s > 0, "trainer.stage_timeout_s", "greater than 0", self.stage_timeout_s)
