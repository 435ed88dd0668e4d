"""Forward and backward passes over ragged micro-batches, through the pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from rl_protocol import BatchData
from rl_protocol.kept_tokens import KeptTokens
from rl_protocol.padding import Sequences, pad_sequences

T = TypeVar("T")

OnOutput = Callable[[int, torch.Tensor], T]
"""(micro-batch number, output of the model [T, ...]) -> in training its share of the loss."""


_NOTHING: Any = object()
"""Result of a pass over padding."""


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def log_probs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: KeptTokens | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [T] of softmax(logits [T, V] / temperature), in nats, over the
    tokens of `kept`; None: over all.
    """
    scores = logits.float() / temperature
    if kept is not None:
        scores = kept.restricted(scores)
    log_p = torch.log_softmax(scores, dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's stage of a model.

    Attributes:
        model: the stage.
        device: device of the model.
        vocab: number of real logits, before the padding of the vocabulary; None: the model outputs
            values, which are the same on all tensor-parallel ranks.
        set_experts: called with each micro-batch, or None for padding, and the places of its rows
            before the stage computes it; None: the model has no experts.
    """

    model: GPTModel
    device: torch.device
    vocab: int | None
    set_experts: Callable[[BatchData | None, int], None] | None = None


def run_passes(
    stage: Stage,
    micro_batches: Sequence[BatchData],
    on_output: OnOutput[T],
    *,
    train: bool,
    before_pass: Callable[[int], None] | None = None,
    after_pass: Callable[[], None] | None = None,
    passes: int = 0,
) -> list[T]:
    """Send micro-batches through the pipeline; a collective over the ranks that share a replica.

    Args:
        stage: this rank's stage.
        micro_batches: at least one row and one response token each; the same on all these ranks.
        on_output: called on the last stage with the logits [T, vocab] or values [T, 1] of each
            micro-batch.
        train: accumulate the gradients of the sum of the loss shares.
        before_pass: called with the number of each pass before this stage computes it.
        after_pass: called after this stage has computed a micro-batch.
        passes: number of passes if above that of micro-batches. The others compute one token of
            padding: ranks that hold each other's experts need equally many.

    Returns:
        The results of `on_output` on the last stage, an empty list on the others.
    """
    passes = max(passes, len(micro_batches))
    if not passes:
        return []

    model, device, set_experts = stage.model, stage.device, stage.set_experts
    config = model.config
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def step(numbers: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        if before_pass is not None:
            before_pass(number)
        if number >= len(micro_batches):
            ids = torch.zeros((1, multiple), dtype=torch.int64, device=device)
            if set_experts is not None:
                set_experts(None, multiple)
            return model(ids, torch.arange(multiple, device=device)[None], None), nothing
        micro = micro_batches[number]
        joined = pad_sequences(micro.ragged("prompts"), micro.ragged("responses"), multiple=multiple)
        ids = joined.ids.to(device)  # padded on the right, where causal attention does not look
        if set_experts is not None:
            set_experts(micro, ids.shape[1])
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        out = model(ids, positions, None)
        if after_pass is not None:
            after_pass()
        return out, partial(finish, number, joined)

    def finish(number: int, joined: Sequences, out: torch.Tensor, non_loss_data: bool = False) -> Any:
        found = out[joined.row.to(device), joined.place.to(device)]
        if stage.vocab is not None:
            found = gather_from_tensor_model_parallel_region(found)[:, : stage.vocab]
        result = on_output(number, found)
        if non_loss_data:
            return result
        return result * passes, result.detach()  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]: Megatron divides by it

    def nothing(out: torch.Tensor, non_loss_data: bool = False) -> Any:
        return _NOTHING if non_loss_data else (out.sum() * 0, _NOTHING)

    longest = max(
        (int((part.ragged("prompts").lengths + part.ragged("responses").lengths).max()) for part in micro_batches),
        default=1,
    )
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(passes)),
        model=model,
        num_microbatches=passes,
        seq_length=_padded(longest, multiple),
        micro_batch_size=max((len(part) for part in micro_batches), default=1),
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return [one for one in found if one is not _NOTHING]
