"""Options of the value function."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol.support.options import group, option
from rl_trainer.config.actor import LOSS_AGG_MODES
from rl_trainer.config.optim import OptimConfig, UpdateConfig

CRITIC_AGG_MODES = tuple(mode for mode in LOSS_AGG_MODES if mode != "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class CriticOptimConfig(OptimConfig):
    """AdamW of the critic, which learns faster than the policy."""

    lr: float = option(1e-5, "learning rate of AdamW", ge=0, lt=math.inf, verl=".")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(UpdateConfig):
    """The value function (only with algorithm.adv_estimator=gae)."""

    optim: CriticOptimConfig = group(CriticOptimConfig, "optimizer of the critic", resume="free", verl=".")
    use_lora: bool = option(
        False,
        "train adapters as `lora` sets them, and the value head, instead of all weights",
        needs="trains_adapters",
    )
    adapter_path: str = option(
        "",
        "PEFT folder of the adapter to start from, as the policy has one, and of the value head, if it has one: `score` of a "
        "model for token or sequence classification with one label; empty: a new one",
        needs="use_lora",
        verl=(".model.lora_adapter_path", ".model.lora.adapter_path"),
    )
    cliprange_value: float = option(
        0.5, "clip range of the value loss: largest change of a value per step", gt=0, verl="."
    )
    loss_agg_mode: str = option("token-mean", "how token losses become one number", choices=CRITIC_AGG_MODES)
    warmup_steps: int = option(0, "first steps in which the critic alone is trained", ge=0)
