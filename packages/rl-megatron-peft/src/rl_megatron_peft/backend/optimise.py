"""AdamW over adapters that are spread over ranks: gradients summed over replicas, clipped by the norm of the whole, then one step.

Megatron's own optimizer and clipping demand CUDA tensors; adapters are small enough for every replica to hold their state whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_megatron_peft.backend.lora import Lora, LoraFactor
from rl_megatron_peft.backend.parallel import Ranks, sum_over_model, sum_over_replicas
from rl_protocol import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW remembers of each factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Attributes:
        lr: learning rate, above 0.
        beta1, beta2: decay of the two moments, in [0, 1).
        weight_decay: at least 0.
        grad_clip: largest norm of the gradient over all adapters, above 0.

    Raises:
        ConfigError: names the setting.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        fine = {
            "lr": 0 < self.lr < math.inf,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "weight_decay": 0 <= self.weight_decay < math.inf,
            "grad_clip": self.grad_clip > 0,
        }
        for name, good in fine.items():
            if not good:
                raise ConfigError(f"AdamConfig.{name} is out of range; got {getattr(self, name)}.", field=name)


def constant(step: int) -> float:
    """A learning rate that stays."""
    del step
    return 1.0


class AdapterOptimiser:
    """The optimizer of this rank's factors.

    Args:
        adapters: of this stage.
        config: settings.
        ranks: where this process stands.
        schedule: number of a step, from 1 -> what the learning rate is multiplied by.
    """

    def __init__(
        self, adapters: Sequence[Lora], config: AdamConfig, ranks: Ranks, schedule: Callable[[int], float] = constant
    ) -> None:
        self.factors = [factor for lora in adapters for factor in lora.factors()]
        self.steps = 0
        self._config = config
        self._ranks = ranks
        self._schedule = schedule
        # A stage without adapters has a placeholder that never changes, so that all ranks go through the same collectives.
        parameters = [factor.parameter for factor in self.factors] or [
            torch.nn.Parameter(torch.zeros(1, device=ranks.device))
        ]
        self._parameters = parameters
        self.adam = torch.optim.AdamW(
            parameters, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def state(self, factor: LoraFactor) -> dict[str, torch.Tensor]:
        """The factor and its moments on this rank, by `<key>` and `<key>.<moment>`; those of a factor that was never stepped are zero."""
        slots: Mapping[str, torch.Tensor] = self.adam.state.get(factor.parameter, {})
        moments = {f"{factor.key}.{name}": slots.get(name, torch.zeros_like(factor.parameter)) for name in MOMENTS}
        return {factor.key: factor.parameter.detach(), **moments}

    def take_state(self, factor: LoraFactor, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take over what `state` gave, after that many steps."""
        with torch.no_grad():
            factor.parameter.copy_(state[factor.key])
        slots = self.adam.state[factor.parameter]
        slots["step"] = torch.tensor(float(steps))
        for name in MOMENTS:
            slots[name] = state[f"{factor.key}.{name}"].to(factor.parameter, copy=True)

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """One step, skipped where the gradient is not finite; returns its norm before clipping. A collective over all ranks."""
        flat = torch.cat([self._gradient(parameter).flatten() for parameter in self._parameters])
        sum_over_replicas(flat)
        parts = flat.split([parameter.numel() for parameter in self._parameters])
        norm = math.sqrt(float(sum_over_model(self._square(parts))))
        if not math.isfinite(norm):
            return norm
        scale = min(1.0, self._config.grad_clip / (norm + 1e-6))
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = (part * scale).view_as(parameter)
        self.steps += 1
        for group in self.adam.param_groups:
            group["lr"] = self._config.lr * self._schedule(self.steps)
        self.adam.step()
        return norm

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)

    def _square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of squares where what all tensor-parallel ranks hold alike counts once."""
        total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
        for factor, part in zip(self.factors, parts[: len(self.factors)], strict=True):
            shared = self._ranks.layout.tensor if factor.split is None else 1
            total += part.double().square().sum() / shared
        return total
