"""AdamW over parameters that are spread over ranks: gradients summed over replicas, clipped by the norm of the whole, then one step.

Megatron's own optimizer and clipping demand CUDA tensors. Every replica holds the state of all its parameters, in float32: of one that the
model has in another type, a float32 copy is trained, gradients are summed in float32, and the model gets the copy, rounded, after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_megatron_peft.backend.parallel import Ranks, sum_over_layer, sum_over_model, sum_over_replicas
from rl_megatron_peft.backend.trained import Trained
from rl_protocol import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW remembers of each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Attributes:
        lr: learning rate, above 0.
        beta1, beta2: decay of the two moments, in [0, 1).
        weight_decay: at least 0.
        grad_clip: largest norm of the gradient over all that is trained, above 0.

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


class Optimiser:
    """The optimizer of what this rank trains.

    Args:
        trained: its parameters.
        config: settings.
        ranks: where this process stands.
        schedule: number of a step, from 1 -> what the learning rate is multiplied by.
    """

    def __init__(
        self, trained: Sequence[Trained], config: AdamConfig, ranks: Ranks, schedule: Callable[[int], float] = constant
    ) -> None:
        self.trained = list(trained)
        self.steps = 0
        self._config = config
        self._ranks = ranks
        self._schedule = schedule
        self._masters = [_master(one.parameter) for one in self.trained]
        # A stage that trains nothing has a placeholder that never changes, so that all ranks go through the same collectives.
        self._parameters = self._masters or [torch.nn.Parameter(torch.zeros(1, device=ranks.device))]
        self.adam = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def state(self) -> Iterator[tuple[Trained, dict[str, torch.Tensor]]]:
        """Each parameter's values and moments on this rank, by `<key>` and `<key>.<moment>`; moments are zero before its first step."""
        for one, master in zip(self.trained, self._masters, strict=True):
            slots: Mapping[str, torch.Tensor] = self.adam.state.get(master, {})
            values = {"": master.detach()}
            values |= {f".{name}": slots.get(name, torch.zeros_like(master)) for name in MOMENTS}
            yield (
                one,
                {
                    f"{key}{suffix}": part
                    for suffix, tensor in values.items()
                    for key, part in zip(one.keys, one.apart(tensor), strict=True)
                },
            )

    def take_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take over what `state` gave, of all parameters, after that many steps."""
        for one, master in zip(self.trained, self._masters, strict=True):

            def joined(suffix: str, one: Trained = one, like: torch.Tensor = master) -> torch.Tensor:
                return one.joined([state[f"{key}{suffix}"] for key in one.keys]).to(like, copy=True)

            with torch.no_grad():
                master.copy_(joined(""))
            slots = self.adam.state[master]
            slots["step"] = torch.tensor(float(steps))
            for name in MOMENTS:
                slots[name] = joined(f".{name}")
        self._hand_out()
        self.steps = steps

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """One step, skipped where the gradient is not finite; returns its norm before clipping. A collective over all ranks."""
        for one, master in zip(self.trained, self._masters, strict=True):
            if one.partial:
                sum_over_layer(self._gradient(master))
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
        self._hand_out()
        return norm

    def _hand_out(self) -> None:
        """Give the model what was trained."""
        with torch.no_grad():
            for one, master in zip(self.trained, self._masters, strict=True):
                if one.parameter is not master:
                    one.parameter.copy_(master)

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)

    def _square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of squares where what all tensor-parallel ranks hold alike counts once."""
        total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
        for one, part in zip(self.trained, parts[: len(self.trained)], strict=True):
            shared = self._ranks.layout.tensor if one.split is None else 1
            total += part.double().square().sum() / shared
        return total


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """What is trained in its place: itself if it is float32, else a copy that sums up its gradients as they come."""
    if parameter.dtype == torch.float32:
        return parameter
    master = torch.nn.Parameter(parameter.detach().float())

    def add(done: torch.Tensor) -> None:
        assert master.grad is not None
        assert done.grad is not None
        master.grad += done.grad
        done.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master
