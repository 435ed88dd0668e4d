"""Options of the optimizer and of mini-batches, shared by actor and critic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol.support.options import Options, group, option, require

LR_SCHEDULES = ("constant", "linear", "cosine")
PASS_TOKENS = 16384
"""Most tokens of a forward pass where neither rows nor tokens per pass are given."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Options):
    """AdamW and its schedule."""

    lr: float = option(
        1e-6, "learning rate of AdamW; 0: nothing is learned, to see what drifts", ge=0, lt=math.inf, verl="."
    )
    weight_decay: float = option(0.01, "decoupled weight decay of AdamW", ge=0, lt=math.inf, verl=".")
    beta1: float = option(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = option(0.999, "decay of the second moment", ge=0, lt=1)
    lr_warmup_steps: int = option(0, "optimizer steps over which lr rises linearly from 0", ge=0)
    lr_scheduler_type: str = option("constant", "learning-rate schedule after warmup", choices=LR_SCHEDULES)
    lr_decay_steps: int = option(0, "linear, cosine: optimizer step at which lr reaches its minimum", ge=0)
    min_lr_ratio: float = option(0.0, "linear, cosine: the minimum, as a share of lr", ge=0, le=1)
    grad_clip: float = option(1.0, "largest global gradient norm", gt=0, verl=(".clip_grad", ".grad_clip"))

    def check(self, path: str) -> None:
        decays = self.lr_scheduler_type != "constant"
        require(
            self.lr_decay_steps > self.lr_warmup_steps if decays else self.lr_decay_steps == 0,
            f"{path}lr_decay_steps",
            f"greater than lr_warmup_steps ({self.lr_warmup_steps}) with linear or cosine, and 0 with constant",
            self.lr_decay_steps,
        )
        require(decays or self.min_lr_ratio == 0, f"{path}min_lr_ratio", "0 with constant", self.min_lr_ratio)

    def lr_factor(self, step: int) -> float:
        """Fraction of `lr` at an optimizer step; the first is 1.

        It rises linearly to 1 over the warmup, then falls to the minimum at `lr_decay_steps` and
        stays there. With constant it stays at 1. The schedules of transformers are one step later:
        there the first step has the factor that this method has for 0.

        Examples:
            >>> falls = OptimConfig(lr_scheduler_type="linear", lr_warmup_steps=2, lr_decay_steps=6)
            >>> [falls.lr_factor(step) for step in (1, 2, 4, 6, 9)]
            [0.5, 1.0, 0.5, 0.0, 0.0]
        """
        warmup = self.lr_warmup_steps
        if step < warmup:
            return step / warmup
        if self.lr_scheduler_type == "constant":
            return 1.0
        progress = min((step - warmup) / (self.lr_decay_steps - warmup), 1.0)
        remaining = 1 - progress if self.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(Options):
    """How a model is updated in a step."""

    optim: OptimConfig = group(OptimConfig, "optimizer", resume="free", verl=".")
    ppo_epochs: int = option(1, "passes over the batch per step", ge=1, verl=".")
    ppo_mini_batch_size: int = option(
        64, "prompts per optimizer step (each brings RolloutConfig.n responses)", ge=1, verl="."
    )
    ppo_micro_batch_size: int = option(
        0,
        f"responses per forward pass; 0: as many as have ppo_max_token_len or {PASS_TOKENS} tokens, prompts included",
        ge=0,
        resume="free",
    )
    ppo_max_token_len: int = option(
        0,
        f"most tokens per forward pass, prompts included (megatron: and padding); 0: {PASS_TOKENS} if ppo_micro_batch_size is 0, and a "
        "longer response alone",
        ge=0,
        resume="free",
    )
    use_remove_padding: bool = option(
        False,
        "join the sequences of a forward pass end to end instead of padding them",
        needs="packs_sequences",
        resume="free",
    )

    def check(self, path: str) -> None:
        require(
            not (self.ppo_max_token_len and self.ppo_micro_batch_size),
            f"{path}ppo_max_token_len",
            f"0 with ppo_micro_batch_size ({self.ppo_micro_batch_size}): forward passes are cut by rows or by tokens",
            self.ppo_max_token_len,
        )

    @property
    def pass_tokens(self) -> int:
        """Most tokens per forward pass; 0: passes are cut by rows."""
        return self.ppo_max_token_len or (0 if self.ppo_micro_batch_size else PASS_TOKENS)

    def schedule(self, rollout_n: int, seed: int) -> Schedule:
        """How a step's batch is cut into mini-batches, with `rollout_n` responses per prompt."""
        return Schedule(epochs=self.ppo_epochs, mini_batch_rows=self.ppo_mini_batch_size * rollout_n, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a step's batch is cut into optimizer steps."""

    epochs: int
    mini_batch_rows: int
    seed: int
