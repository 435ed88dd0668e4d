"""Forward and backward passes over ragged micro-batches, through the stages of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from rl_protocol import BatchData, BatchError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """N trajectories as the model takes them, and where it predicts their T response tokens.

    Attributes:
        ids: int64 [N, L], right-padded: causal attention does not look at what stands behind.
        row, place: int64 [T], the place whose output predicts the token: one before its own.
        targets: int64 [T], the response tokens.
    """

    ids: torch.Tensor
    row: torch.Tensor
    place: torch.Tensor
    targets: torch.Tensor


def token_places(batch: BatchData, device: torch.device, multiple: int = 1) -> TokenPlaces:
    """Join `prompts` and `responses` of every row; L is a multiple of `multiple`.

    Raises:
        BatchError: an empty prompt: nothing would predict the first response token.
    """
    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    p, r = prompts.lengths, responses.lengths
    if (p == 0).any():
        raise BatchError(f"Row {int(np.argmin(p))} has an empty prompt; every prompt needs at least one token.")
    ids = np.zeros((len(batch), _padded(int((p + r).max(initial=1)), multiple)), np.int64)
    columns = np.arange(ids.shape[1])[None, :]
    ids[columns < p[:, None]] = prompts.values
    ids[(columns >= p[:, None]) & (columns < (p + r)[:, None])] = responses.values
    row = np.repeat(np.arange(len(batch)), r)
    place = np.repeat(p - 1 - responses.offsets[:-1], r) + np.arange(row.size)
    targets = np.asarray(responses.values, np.int64)
    return TokenPlaces(
        ids=torch.from_numpy(ids).to(device),
        row=torch.from_numpy(row).to(device),
        place=torch.from_numpy(place).to(device),
        targets=torch.tensor(targets, device=device),
    )


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([T] log-probability of each target, [T] entropy in nats) under softmax(logits [T, V] / temperature)."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def run_passes(
    model: GPTModel,
    parts: Sequence[BatchData],
    vocab: int | None,
    device: torch.device,
    then: Callable[[int, torch.Tensor], T],
    *,
    train: bool,
    begin: Callable[[int], None] | None = None,
) -> list[T]:
    """Send the parts through the pipeline; all ranks that share the model call it with the same ones.

    Args:
        model: this rank's stage.
        parts: micro-batches of at least one row and one response token each.
        vocab: number of logits that are real; those behind them pad the vocabulary. None: it puts out values, which ranks do not share.
        device: where the model is.
        then: (number of the part, its logits [T, vocab] or values [T, 1]) -> on the last stage, the share of the loss in training, else anything.
        train: accumulate gradients of the sum of the shares.
        begin: called with the number of each part before this stage computes it.

    Returns:
        What `then` returned, by part; on all but the last stage nothing.
    """
    if not parts:
        return []

    config = model.config
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def step(numbers: Iterator[int], stage: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        if begin is not None:
            begin(number)
        tokens = token_places(parts[number], device, multiple)
        positions = torch.arange(tokens.ids.shape[1], device=device).expand_as(tokens.ids)
        return stage(tokens.ids, positions, None), partial(finish, number, tokens)

    def finish(number: int, tokens: TokenPlaces, out: torch.Tensor, non_loss_data: bool = False) -> Any:
        found = out[tokens.row, tokens.place]
        if vocab is not None:
            found = gather_from_tensor_model_parallel_region(found)[:, :vocab]
        result = then(number, found)
        if non_loss_data:
            return result
        return result * len(parts), result.detach()  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]: Megatron divides by it

    longest = max(int((part.ragged("prompts").lengths + part.ragged("responses").lengths).max()) for part in parts)
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(len(parts))),
        model=model,
        num_microbatches=len(parts),
        seq_length=_padded(longest, multiple),
        micro_batch_size=max(len(part) for part in parts),
        forward_only=not train,
        collect_non_loss_data=not train,
    )
