"""AdamW over parameters that are spread over ranks.

A step sums the gradients over replicas, clips them by the norm over the whole model, and updates.
Megatron's own optimizer and clipping require CUDA tensors. All state is float32: for a parameter of
another dtype a float32 copy is trained, and the model gets the rounded copy after each step.

Every replica holds the state of all its parameters, or of some of them, which it updates for all
replicas (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054). torch's ZeroRedundancyOptimizer is not
used because it needs the float32 copies on every replica and gathers its state as pickles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rl_megatron_peft.backend.parallel import (
    Ranks,
    all_reduce_data_parallel,
    all_reduce_expert_parallel,
    all_reduce_model_parallel,
    all_reduce_tensor_parallel,
    broadcast_from_replicas,
    expert_replica,
)
from rl_megatron_peft.backend.train.gradients import Gradients
from rl_megatron_peft.backend.train.param_groups import TrainedParameter
from rl_megatron_peft.backend.train.settings import AdamSettings, constant
from rl_megatron_peft.base_model.layout import state_owners
from rl_protocol.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in `torch.optim`."""


class Optimizer:
    """The optimizer of this rank's parameters.

    Args:
        trained: the parameters.
        config: settings of AdamW.
        ranks: place of this process.
        lr_schedule: number of a step, from 1 -> factor of the learning rate.
        distributed: each parameter's state is on one replica only, see
            `rl_megatron_peft.base_model.layout.state_owners`. The results are the same.

    Raises:
        ConfigError: `distributed` with experts that are divided over replicas.
    """

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        config: AdamSettings,
        ranks: Ranks,
        lr_schedule: Callable[[int], float] = constant,
        *,
        distributed: bool = False,
    ) -> None:
        self.trained = list(trained)
        if distributed and ranks.layout.expert > 1:
            raise ConfigError(
                f"The optimizer state can't be divided over replicas that hold different experts; got expert={ranks.layout.expert}. "
                "Set distributed_optimizer=False or expert=1.",
                field="distributed_optimizer",
            )
        self.distributed = distributed
        self.steps = 0
        self._config = config
        self._ranks = ranks
        self._lr_schedule = lr_schedule
        sizes = [one.parameter.numel() for one in self.trained]
        self._owners = state_owners(sizes, ranks.replicas) if distributed else None
        self._owned = [number for number in range(len(sizes)) if not self._owners or self._owners[number] == ranks.data]
        self._masters = {number: _master(self.trained[number].parameter) for number in self._owned}
        self._gradients = Gradients(self.trained, self._owners, ranks.device)
        self.adam = torch.optim.AdamW(
            [{"params": list(self._masters.values())}],  # may be empty
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the last step, also of one before a resume; else that of step 1."""
        return self._config.lr * self._lr_schedule(max(self.steps, 1))

    def replica_id(self, one: TrainedParameter | None = None) -> int:
        """Number of this rank's copy of the optimizer state of a parameter, from 0.

        None: of a parameter that belongs to no expert.
        """
        if self.distributed:
            return 0
        return expert_replica() if one is not None and one.expert else self._ranks.data

    def state(self) -> Iterator[tuple[TrainedParameter, dict[str, torch.Tensor]]]:
        """Yield values and moments of the parameters whose state is on this rank.

        Their names are `<key>` and `<key>.<moment>`; moments are zero before the first step.
        """
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
                    for key, part in zip(one.keys, one.unfuse(tensor), strict=True)
                },
            )

    def state_shapes(self) -> Iterator[tuple[TrainedParameter, dict[str, torch.Size], bool]]:
        """Yield the shapes of `state` for all parameters, and whether this rank holds it."""
        for number, one in enumerate(self.trained):
            parts = zip(one.keys, one.unfuse(one.parameter.detach()), strict=True)
            shapes = {
                f"{key}{suffix}": part.shape for key, part in parts for suffix in ("", *(f".{m}" for m in MOMENTS))
            }
            yield one, shapes, number in self._masters

    def load_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore `state` after that many steps; if distributed, a collective over replicas."""
        for number, master in self._masters.items():

            def restored(
                suffix: str, one: TrainedParameter = self.trained[number], like: torch.Tensor = master
            ) -> torch.Tensor:
                return one.fuse([state[f"{key}{suffix}"] for key in one.keys]).to(like, copy=True)

            with torch.no_grad():
                master.copy_(restored(""))
            slots = self.adam.state[master]
            slots["step"] = torch.tensor(float(steps))
            for name in MOMENTS:
                slots[name] = restored(f".{name}")
        self._update_model()
        self.steps = steps

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self._gradients.zero()

    def step(self) -> float:
        """Make a step and return the norm of the gradient before clipping; a collective.

        The step is skipped if the norm is not finite.
        """
        parts = self._gradients.parts
        for one, part in zip(self.trained, parts, strict=True):
            if one.partial:
                all_reduce_tensor_parallel(part)
        self._gradients.reduce()
        norm = self._norm(parts)
        if not math.isfinite(norm):
            return norm
        scale = min(1.0, self._config.grad_clip / (norm + 1e-6))
        for number, master in self._masters.items():
            master.grad = parts[number].mul_(scale)
        self.steps += 1
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        self._update_model()
        return norm

    def _update_model(self) -> None:
        """Copy the trained values into the model, here and on other replicas."""
        with torch.no_grad():
            for number, master in self._masters.items():
                if self.trained[number].parameter is not master:
                    self.trained[number].parameter.copy_(master)
        if self._owners is not None:
            broadcast_from_replicas(zip((one.parameter.detach() for one in self.trained), self._owners, strict=True))

    def _norm(self, parts: Sequence[torch.Tensor]) -> float:
        """Return the norm over the whole model; gradients that ranks have in common count once.

        The squares are added in the same order under any division of the state.
        """
        squares = torch.zeros(len(parts), dtype=torch.float64, device=self._ranks.device)
        for number in self._owned:
            shared = self._ranks.layout.tensor if self.trained[number].split is None else 1
            squares[number] = parts[number].double().square().sum() / shared
        if self.distributed:
            all_reduce_data_parallel(squares)
        of_experts = torch.tensor([one.expert for one in self.trained], device=squares.device, dtype=torch.bool)
        total = squares[~of_experts].sum() + all_reduce_expert_parallel(squares[of_experts].sum())
        return math.sqrt(float(all_reduce_model_parallel(total)))


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the parameter itself if it is float32, else a float32 copy to train."""
    return parameter if parameter.dtype == torch.float32 else torch.nn.Parameter(parameter.detach().float())
