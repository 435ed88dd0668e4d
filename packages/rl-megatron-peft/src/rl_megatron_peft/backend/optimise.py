"""AdamW over parameters that are spread over ranks: gradients summed over replicas, clipped by the norm of the whole, then one step.

Megatron's own optimizer and clipping demand CUDA tensors. State is float32: of a parameter that the model has in another type, a float32
copy is trained, gradients are summed in float32, and the model gets the copy, rounded, after each step.

Every replica holds the state of all its parameters, or of some whole ones, which it steps for all (ZeRO-1: Rajbhandari et al. 2020,
arXiv:1910.02054). That is not torch's ZeroRedundancyOptimizer: it wants the float32 copies on every replica, and gathers its state as pickles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_megatron_peft.backend.gradients import Gradients
from rl_megatron_peft.backend.parallel import Ranks, from_replicas, sum_over_layer, sum_over_model, sum_over_replicas
from rl_megatron_peft.backend.trained import Trained
from rl_megatron_peft.layout import keepers
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
        distributed: each parameter's state is on one replica alone, see `rl_megatron_peft.layout.keepers`; what is learnt is the same.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        config: AdamConfig,
        ranks: Ranks,
        schedule: Callable[[int], float] = constant,
        *,
        distributed: bool = False,
    ) -> None:
        self.trained = list(trained)
        self.distributed = distributed
        self.steps = 0
        self._config = config
        self._ranks = ranks
        self._schedule = schedule
        sizes = [one.parameter.numel() for one in self.trained]
        self._keepers = keepers(sizes, ranks.replicas) if distributed else None
        self._kept = [
            number for number in range(len(sizes)) if not self._keepers or self._keepers[number] == ranks.data
        ]
        self._masters = {number: _master(self.trained[number].parameter) for number in self._kept}
        self._gradients = Gradients(self.trained, self._keepers, ranks.device)
        self.adam = torch.optim.AdamW(
            [{"params": list(self._masters.values())}],  # of which there may be none
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    @property
    def copy(self) -> int:
        """Which of the copies of its state, from 0, this rank has."""
        return 0 if self.distributed else self._ranks.data

    def state(self) -> Iterator[tuple[Trained, dict[str, torch.Tensor]]]:
        """Values and moments of the parameters whose state is on this rank, by `<key>` and `<key>.<moment>`; moments are zero at first."""
        for number, master in self._masters.items():
            one = self.trained[number]
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

    def expected(self) -> Iterator[tuple[Trained, dict[str, torch.Size], bool]]:
        """Shapes of what `state` gives, of all parameters of this rank, and whether their state is on it."""
        for number, one in enumerate(self.trained):
            parts = zip(one.keys, one.apart(one.parameter.detach()), strict=True)
            shapes = {
                f"{key}{suffix}": part.shape for key, part in parts for suffix in ("", *(f".{m}" for m in MOMENTS))
            }
            yield one, shapes, number in self._masters

    def take_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take over what `state` gave, after that many steps; if distributed, a collective over replicas."""
        for number, master in self._masters.items():

            def joined(suffix: str, one: Trained = self.trained[number], like: torch.Tensor = master) -> torch.Tensor:
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
        self._gradients.zero()

    def step(self) -> float:
        """One step, skipped where the gradient is not finite; returns its norm before clipping. A collective over all ranks."""
        parts = self._gradients.parts
        for one, part in zip(self.trained, parts, strict=True):
            if one.partial:
                sum_over_layer(part)
        self._gradients.sum_up()
        norm = self._norm(parts)
        if not math.isfinite(norm):
            return norm
        scale = min(1.0, self._config.grad_clip / (norm + 1e-6))
        for number, master in self._masters.items():
            master.grad = parts[number].mul_(scale)
        self.steps += 1
        for group in self.adam.param_groups:
            group["lr"] = self._config.lr * self._schedule(self.steps)
        self.adam.step()
        self._hand_out()
        return norm

    def _hand_out(self) -> None:
        """Give the model what was trained, here and on other replicas."""
        with torch.no_grad():
            for number, master in self._masters.items():
                if self.trained[number].parameter is not master:
                    self.trained[number].parameter.copy_(master)
        if self._keepers is not None:
            from_replicas(zip((one.parameter.detach() for one in self.trained), self._keepers, strict=True))

    def _norm(self, parts: Sequence[torch.Tensor]) -> float:
        """Of the whole model's gradient, where what all tensor-parallel ranks hold alike counts once. Squares are added in the same order
        wherever they were computed."""
        squares = torch.zeros(len(parts), dtype=torch.float64, device=self._ranks.device)
        for number in self._kept:
            shared = self._ranks.layout.tensor if self.trained[number].split is None else 1
            squares[number] = parts[number].double().square().sum() / shared
        if self.distributed:
            sum_over_replicas(squares)
        return math.sqrt(float(sum_over_model(squares.sum())))


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """What is trained in its place: itself if it is float32, else a copy."""
    return parameter if parameter.dtype == torch.float32 else torch.nn.Parameter(parameter.detach().float())
