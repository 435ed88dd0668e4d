"""The optimization loop of policy and critic: mini-batches, forward passes, clipping, schedule;
and the moving average of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rl_protocol import BatchData
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.backends.forward_passes import ForwardPasses, silent
from rl_trainer.backends.parallel_strategy import reshard
from rl_trainer.backends.token_batch import lengths_of
from rl_trainer.backends.world import CPU
from rl_trainer.config import OptimConfig
from rl_trainer.config.lora import LoraConfig

MicroLoss = Callable[[BatchData, BatchCounts, WeightedMeans], torch.Tensor]
"""(micro-batch, sizes of the mini-batch over all ranks, sums for metrics) -> its part of the loss.
"""


def count(batch: BatchData) -> BatchCounts:
    """Count unmasked tokens, and trajectories with at least one."""
    mask = batch.ragged("response_mask")
    running = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    per_row = running[mask.offsets[1:]] - running[mask.offsets[:-1]]
    return BatchCounts(tokens=int(per_row.sum()), sequences=int((per_row > 0).sum()))


def adapter_dropout(model: torch.nn.Module, lora: LoraConfig | None) -> AbstractContextManager[None]:
    """Context of an update: inputs of the adapters are dropped if their settings say so."""
    if lora is None or not lora.dropout:
        return nullcontext()
    from rl_trainer.backends.peft_lora import dropping  # needs the extra `lora`

    return dropping(model)


class MiniBatchOptimizer:
    """AdamW with a schedule, gradient clipping and the mini-batch loop, over the trainable weights.

    A mini-batch with a non-finite gradient is skipped and counted in `skipped_steps`.

    Args:
        model: under training, on its device.
        config: of AdamW.
        passes: how forward passes are made.
        offload: keep AdamW's state in host memory, and no gradients, between two `run`.
    """

    def __init__(
        self, model: torch.nn.Module, config: OptimConfig, passes: ForwardPasses, *, offload: bool = False
    ) -> None:
        self._config = config
        self._offload = offload
        self._passes = passes
        self._named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._weights = list(self._named.values())
        self._adam = torch.optim.AdamW(
            self._weights,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,  # one pass over weights and moments instead of one per operation
        )
        self.steps = 0
        """Optimizer steps made; the learning-rate schedule depends on it."""

    def moments(self) -> Mapping[str, torch.Tensor]:
        """AdamW's state, by `<weight>/<name>`, without weights that it has never updated."""
        state = self._adam.state
        return {
            f"{name}/{what}": tensor
            for name, weight in self._named.items()
            if weight in state
            for what, tensor in state[weight].items()
        }

    def expect(self, moments: Iterable[str]) -> None:
        """Allocate state of these names, so that `moments` returns tensors to fill.

        With `offload` it is in host memory. Names of unknown weights are ignored.
        """
        for moment in moments:
            name, _, what = moment.rpartition("/")
            weight = self._named.get(name)
            if weight is not None:
                fresh = torch.tensor(0.0, device=weight.device) if what == "step" else torch.zeros_like(weight)
                self._adam.state[weight][what] = fresh.to(CPU) if self._offload else fresh

    def run(self, batch: BatchData, mini_batches: Sequence[Sequence[int]], loss: MicroLoss) -> dict[str, float]:
        """Make one optimizer step per mini-batch; all ranks call it with equally many.

        Args:
            batch: the rows of this rank.
            mini_batches: this rank's rows in each mini-batch; none is legal.
            loss: see MicroLoss.

        Returns:
            Means over all ranks of what `loss` added, `grad_norm` (the mean of those that are
            finite; NaN if none is), `lr` (of the last step that was made) and `skipped_steps`.
        """
        means, norms, skipped = WeightedMeans(), list[float](), 0
        with self._state_on_device():
            for rows in mini_batches:
                norm = self._accumulate(batch, rows, loss, means)
                norms.append(norm)
                if np.isfinite(norm):
                    self._step()
                else:
                    skipped += 1
        return {
            **means.total(self._passes.world.total).result(),
            "grad_norm": _mean_of_finite(norms),
            "lr": self._lr(),
            "skipped_steps": float(skipped),
        }

    @contextmanager
    def _state_on_device(self) -> Generator[None]:
        """Context in which AdamW's state is on the device of its weights."""
        if not self._offload:
            yield
            return
        self._move_state(lambda weight: weight.device)
        try:
            yield
        finally:
            self._adam.zero_grad(set_to_none=True)
            self._move_state(lambda _: CPU)

    def _move_state(self, device: Callable[[torch.Tensor], torch.device]) -> None:
        for weight, state in self._adam.state.items():
            state.update({name: tensor.to(device(weight)) for name, tensor in state.items()})

    def _accumulate(self, batch: BatchData, rows: Sequence[int], loss: MicroLoss, means: WeightedMeans) -> float:
        """Compute the clipped gradients of one mini-batch; returns their norm before clipping."""
        world, own = self._passes.world, count(batch.select_rows(list(rows)))
        tokens, sequences = world.total([float(own.tokens), float(own.sequences)])
        counts = BatchCounts(tokens=int(tokens), sequences=int(sequences))
        self._adam.zero_grad(set_to_none=True)
        for part in self._passes.cut(lengths_of(batch), rows):
            micro = batch.select_rows(part) if part else silent(batch)
            (loss(micro, counts, means) * world.size).backward()  # FSDP averages over the ranks; the losses add up
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self._config.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _lr(self) -> float:
        """The learning rate of the last step; AdamW has it only if it made the step."""
        return self._config.lr * self._config.lr_factor(self.steps)

    def _step(self) -> None:
        self.steps += 1
        for weights in self._adam.param_groups:
            weights["lr"] = self._lr()
        self._adam.step()
        for weight in self._weights:
            if not isinstance(weight, DTensor):
                torch.autograd.graph.increment_version(weight)  # the fused step does not; ComputeWeights reads it


def _mean_of_finite(norms: Sequence[float]) -> float:
    """The mean of the finite numbers; NaN if there is none, and 0 without any number."""
    finite = [norm for norm in norms if np.isfinite(norm)]
    if norms and not finite:
        return float("nan")
    return float(np.mean(finite)) if finite else 0.0


class MovingAverage:
    """Exponential moving average of the trainable weights, in memory beside them.

    It begins as the weights. `update` makes it decay * average + (1 - decay) * weights, as the
    teacher of SDFT (arXiv 2601.19897) and mean teachers (arXiv 1703.01780). On several ranks each
    keeps its own part.

    Args:
        model: the model under training.
        decay: part of the average that stays at an update, in (0, 1).
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._model = model
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The average, by the weights' names; its memory, for checkpoints."""
        return self._average

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average."""
        for name, weight in self._weights.items():
            _local(self._average[name]).lerp_(_local(weight), 1 - self._decay)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Context in which the model has the average in place of its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)  # what is gathered has the values from before
        for name, weight in self._weights.items():
            weights, average = _local(weight), _local(self._average[name])
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
