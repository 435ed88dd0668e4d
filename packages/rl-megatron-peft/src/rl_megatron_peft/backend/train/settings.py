"""Settings of training on Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rl_protocol import BatchData, ConfigError

MiniBatchSchedule = Callable[[BatchData, int], Sequence[Sequence[int]]]
"""(batch, number of the update) -> rows of each optimizer step."""


class AdamSettings(Protocol):
    """Settings of AdamW: an `AdamConfig`, or a trainer's own object with these attributes."""

    @property
    def lr(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def grad_clip(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Attributes:
        lr: learning rate, at least 0.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        weight_decay: at least 0.
        grad_clip: largest norm of the gradient over all trained parameters, above 0.

    Raises:
        ConfigError: a value is out of range; names the setting.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        in_range = {
            "lr": 0 <= self.lr < math.inf,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "weight_decay": 0 <= self.weight_decay < math.inf,
            "grad_clip": self.grad_clip > 0,
        }
        for name, fine in in_range.items():
            if not fine:
                raise ConfigError(f"AdamConfig.{name} is out of range; got {getattr(self, name)}.", field=name)


def constant(step: int) -> float:
    """Keep the learning rate constant."""
    del step
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a policy or critic is trained.

    Attributes:
        adam: settings of the optimizer.
        lr_schedule: number of an optimizer step, from 1 -> factor of the learning rate.
        mini_batches: rows of each optimizer step; None: one step over all rows.
        micro_batch_rows: most rows per pass in updates; 0: any number.
        micro_batch_tokens: most tokens per pass, padding included; a longer row is a pass of its
            own. 0: any number in updates, and FORWARD_TOKENS without gradients.
        forward_rows: most rows per pass without gradients.
        seed: seed of new adapters and of dropout.
        dtype: dtype of the model and of computation. Adapters, a value head, and the optimizer's
            copy of trained weights are float32.
        fused: see `rl_megatron_peft.backend.lora.attach.attach`.
        distributed_optimizer: data-parallel replicas share the optimizer state; see Optimizer.
        merge_on_save: a policy with adapters writes whole models, with the adapter merged in,
            instead of PEFT folders.
        records_experts: `compute_log_probs` of a policy also returns the experts of each token,
            which an update with these columns replays.
        sends: false on a rank whose weights another one sends: `named_weights` of a policy takes
            part in gathering them, copies nothing to the host and yields nothing.
    """

    adam: AdamSettings = field(default_factory=AdamConfig)
    lr_schedule: Callable[[int], float] = constant
    mini_batches: MiniBatchSchedule | None = None
    micro_batch_rows: int = 8
    micro_batch_tokens: int = 0
    forward_rows: int = 64
    seed: int = 0
    dtype: torch.dtype = torch.float32
    fused: bool = True
    distributed_optimizer: bool = False
    merge_on_save: bool = False
    records_experts: bool = False
    sends: bool = True
