"""Settings of the trainer's parts. Each class is checked when built; messages name the key to set.

Every field carries its help text in `metadata["help"]`; the app lists them. Types are plain so that any YAML reader can fill them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl_protocol import ConfigError

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
KL_TYPES = ("k1", "k2", "k3", "abs")


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and its help text."""
    return field(default=default, metadata={"help": text})


def group(kind: type[Any], text: str) -> Any:
    """A dataclass field that is a group of settings."""
    return field(default_factory=kind, metadata={"help": text})


def require(ok: bool, key: str, rule: str, got: object) -> None:
    """Raise ConfigError for `key` unless `ok`; `rule` completes the sentence "<key> must be ..."."""
    if not ok:
        raise ConfigError(f"{key} must be {rule}; got {got!r}.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-6, "learning rate of AdamW")
    weight_decay: float = option(0.01, "decoupled weight decay of AdamW")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.999, "decay of the second moment")
    lr_warmup_steps: int = option(0, "optimizer steps over which lr rises linearly from 0")
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


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy under training and its loss."""

    optim: OptimConfig = group(OptimConfig, "optimizer of the actor")
    ppo_epochs: int = option(1, "passes over the batch per step")
    ppo_mini_batch_size: int = option(64, "prompts per optimizer step (each brings rollout.n responses)")
    ppo_micro_batch_size: int = option(0, "responses per forward pass; 0: the whole mini-batch")
    clip_ratio_low: float = option(0.2, "lower clip of the probability ratio: 1 - this")
    clip_ratio_high: float = option(0.2, "upper clip of the probability ratio: 1 + this")
    clip_ratio_c: float = option(3.0, "dual clip: bound of the loss where the advantage is negative")
    loss_agg_mode: str = option("token-mean", "how token losses become one number: " + ", ".join(LOSS_AGG_MODES))
    entropy_coeff: float = option(0.0, "weight of the entropy bonus in the loss")
    use_kl_loss: bool = option(False, "add the divergence from the reference policy to the loss")
    kl_loss_coef: float = option(0.001, "weight of that divergence")
    kl_loss_type: str = option("k3", "its estimator: " + ", ".join(KL_TYPES))

    def __post_init__(self) -> None:
        require(self.ppo_epochs >= 1, "actor.ppo_epochs", "at least 1", self.ppo_epochs)
        require(self.ppo_mini_batch_size >= 1, "actor.ppo_mini_batch_size", "at least 1", self.ppo_mini_batch_size)
        require(self.ppo_micro_batch_size >= 0, "actor.ppo_micro_batch_size", "at least 0", self.ppo_micro_batch_size)
        require(0 < self.clip_ratio_low < 1, "actor.clip_ratio_low", "between 0 and 1", self.clip_ratio_low)
        require(self.clip_ratio_high > 0, "actor.clip_ratio_high", "greater than 0", self.clip_ratio_high)
        require(self.clip_ratio_c > 1, "actor.clip_ratio_c", "greater than 1", self.clip_ratio_c)
        require(
            self.loss_agg_mode in LOSS_AGG_MODES, "actor.loss_agg_mode", f"one of {LOSS_AGG_MODES}", self.loss_agg_mode
        )
        require(self.kl_loss_coef >= 0, "actor.kl_loss_coef", "at least 0", self.kl_loss_coef)
        require(self.kl_loss_type in KL_TYPES, "actor.kl_loss_type", f"one of {KL_TYPES}", self.kl_loss_type)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function (only with algorithm.adv_estimator=gae)."""

    optim: OptimConfig = group(OptimConfig, "optimizer of the critic")
    ppo_epochs: int = option(1, "passes over the batch per step")
    ppo_mini_batch_size: int = option(64, "prompts per optimizer step (each brings rollout.n responses)")
    ppo_micro_batch_size: int = option(0, "responses per forward pass; 0: the whole mini-batch")
    cliprange_value: float = option(0.5, "largest move of a value per step")
    loss_agg_mode: str = option("token-mean", "how token losses become one number: " + ", ".join(LOSS_AGG_MODES))
    warmup_steps: int = option(0, "first steps in which the critic alone is trained")

    def __post_init__(self) -> None:
        require(self.ppo_epochs >= 1, "critic.ppo_epochs", "at least 1", self.ppo_epochs)
        require(self.ppo_mini_batch_size >= 1, "critic.ppo_mini_batch_size", "at least 1", self.ppo_mini_batch_size)
        require(self.ppo_micro_batch_size >= 0, "critic.ppo_micro_batch_size", "at least 0", self.ppo_micro_batch_size)
        require(self.cliprange_value > 0, "critic.cliprange_value", "greater than 0", self.cliprange_value)
        require(
            self.loss_agg_mode in LOSS_AGG_MODES, "critic.loss_agg_mode", f"one of {LOSS_AGG_MODES}", self.loss_agg_mode
        )
        require(self.warmup_steps >= 0, "critic.warmup_steps", "at least 0", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How advantages come from rewards."""

    name: str = option("grpo", "preset this run started from; set it with algorithm=grpo or algorithm=ppo")
    adv_estimator: str = option("grpo", "advantage estimator: grpo or gae")
    gamma: float = option(1.0, "discount per token")
    lam: float = option(1.0, "lambda of GAE")
    norm_adv_by_std_in_grpo: bool = option(True, "divide by the standard deviation of the group (false: Dr.GRPO)")
    use_kl_in_reward: bool = option(False, "subtract the divergence from the reference policy from each token's reward")
    kl_penalty: str = option("k1", "its estimator: " + ", ".join(KL_TYPES))
    kl_coef: float = option(0.001, "weight of that divergence")

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, "algorithm.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.lam <= 1, "algorithm.lam", "in [0, 1]", self.lam)
        require(self.kl_penalty in KL_TYPES, "algorithm.kl_penalty", f"one of {KL_TYPES}", self.kl_penalty)
        require(self.kl_coef >= 0, "algorithm.kl_coef", "at least 0", self.kl_coef)


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
    n: int = option(8, "responses per prompt")
    temperature: float = option(1.0, "divides the logits before sampling")
    top_p: float = option(1.0, "sample from the smallest set of tokens with this much probability")
    top_k: int = option(0, "sample from this many most likely tokens; 0: all")
    response_length: int = option(8, "most tokens per response")
    ignore_eos: bool = option(False, "do not stop at the end-of-sequence token")
    max_batch_size: int = option(512, "responses generated side by side in one replica")
    val_kwargs: ValidationSampling = group(ValidationSampling, "sampling for validation")

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "rollout.num_workers", "at least 1", self.num_workers)
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


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length, pace and seed of a run."""

    total_training_steps: int = option(30, "steps to train")
    test_freq: int = option(5, "validate every so many steps; 0: only before and after")
    val_before_train: bool = option(True, "validate before the first step")
    seed: int = option(0, "everything random is derived from it")
    stage_timeout_s: float = option(600.0, "longest one stage of a step may take, seconds")

    def __post_init__(self) -> None:
        require(self.total_training_steps >= 0, "trainer.total_training_steps", "at least 0", self.total_training_steps)
        require(self.test_freq >= 0, "trainer.test_freq", "at least 0", self.test_freq)
        require(0 <= self.seed < 2**31, "trainer.seed", "in [0, 2**31)", self.seed)
        require(self.stage_timeout_s > 0, "trainer.stage_timeout_s", "greater than 0", self.stage_timeout_s)
