"""Forward and backward passes over ragged micro-batches, through the pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def run_passes(
    model: GPTModel,
    micro_batches: Sequence[BatchData],
    on_output: OnOutput[T],
    *,
    vocab: int | None,
    device: torch.device,
    train: bool,
    before_pass: Callable[[int], None] | None = None,
) -> list[T]:
    """Send micro-batches through the pipeline; a collective over the ranks that share a replica.

    Args:
        model: this rank's stage.
        micro_batches: at least one row and one response token each; the same on all these ranks.
        on_output: called on the last stage with the logits [T, vocab] or values [T, 1] of each
            micro-batch.
        vocab: number of real logits, before the padding of the vocabulary; None: the model outputs
            values, which are the same on all tensor-parallel ranks.
        device: device of the model.
        train: accumulate the gradients of the sum of the loss shares.
        before_pass: called with the number of each micro-batch before this stage computes it.

    Returns:
        The results of `on_output` on the last stage, an empty list on the others.
    """
    if not micro_batches:
        return []

    config = model.config
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def step(numbers: Iterator[int], stage: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        if before_pass is not None:
            before_pass(number)
        micro = micro_batches[number]
        joined = pad_sequences(micro.ragged("prompts"), micro.ragged("responses"), multiple=multiple)
        ids = joined.ids.to(device)  # padded on the right, where causal attention does not look
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        return stage(ids, positions, None), partial(finish, number, joined)

    def finish(number: int, joined: Sequences, out: torch.Tensor, non_loss_data: bool = False) -> Any:
        found = out[joined.row.to(device), joined.place.to(device)]
        if vocab is not None:
            found = gather_from_tensor_model_parallel_region(found)[:, :vocab]
        result = on_output(number, found)
        if non_loss_data:
            return result
        return result * len(micro_batches), result.detach()  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]: Megatron divides by it

    longest = max(
        int((part.ragged("prompts").lengths + part.ragged("responses").lengths).max()) for part in micro_batches
    )
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(len(micro_batches))),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=_padded(longest, multiple),
        micro_batch_size=max(len(part) for part in micro_batches),
        forward_only=not train,
        collect_non_loss_data=not train,
    )
