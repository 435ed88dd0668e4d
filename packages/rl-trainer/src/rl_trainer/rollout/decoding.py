"""Generates responses in a batch: each prompt is computed once, and finished rows are dropped."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_protocol import KeptSets
from rl_protocol.batch.routed_experts import ExpertIds
from rl_protocol.padding import mask_left, position_ids
from rl_protocol.ports import GenerationRequest
from rl_trainer.backends.experts.routing import ExpertRouting
from rl_trainer.backends.loading import Facts
from rl_trainer.backends.token_batch import image_inputs
from rl_trainer.kernels.linear import row_multiple
from rl_trainer.rollout.kv_cache import keep_rows, new_cache
from rl_trainer.rollout.llama_decoder import decodes, next_logits
from rl_trainer.rollout.recorded_steps import KeptSteps, RoutedSteps
from rl_trainer.rollout.sampling import Sampler
from rl_trainer.rollout.stop_strings import StopSearch

LEAVE = 32
"""Finished rows leave the batch once at least one in so many can. Some stay, so that the number of
rows is a multiple of `row_multiple`."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Different prompts of a batch, padded on the left.

    Attributes:
        ids: int64 [P, L].
        attention_mask: int64 [P, L], 0 at padding; None if all have the same length.
        position_ids: int64 [P, L], or [3, P, L] for a model that sees images.
        images: further arguments of the model.
        source: int64 [B], the prompt of each request.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    images: dict[str, torch.Tensor]
    source: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        """bool [P, L], false at padding."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.attention_mask is None else self.attention_mask > 0

    def to(self, device: torch.device) -> Prompts:
        """The prompts on a device."""
        mask = self.attention_mask
        return replace(
            self,
            ids=self.ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            position_ids=self.position_ids.to(device),
            images={name: tensor.to(device) for name, tensor in self.images.items()},
            source=self.source.to(device),
        )


def read_prompts(model: Any, facts: Facts, requests: Sequence[GenerationRequest]) -> Prompts:
    """The prompts of the requests, each once, on the CPU."""
    place: dict[Any, int] = {}
    different: list[GenerationRequest] = []
    source: list[int] = []
    for request in requests:
        key = (request.prompt_ids, tuple(map(id, request.images)))
        if key not in place:
            place[key] = len(different)
            different.append(request)
        source.append(place[key])
    lengths = [len(request.prompt_ids) for request in different]
    width = max(lengths)
    real = mask_left(torch.tensor(lengths), width)
    ids = torch.full(real.shape, facts.pad_id)
    ids[real] = torch.tensor([token for request in different for token in request.prompt_ids])
    mask, positions = real.long(), position_ids(real)
    images = _images(facts, different, ids)
    if images:
        positions, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=images["mm_token_type_ids"],
            image_grid_thw=images["image_grid_thw"],
            attention_mask=mask,
        )
    return Prompts(
        ids=ids,
        attention_mask=mask if min(lengths) < width else None,
        position_ids=positions,
        images=images,
        source=torch.tensor(source),
    )


def _images(facts: Facts, requests: Sequence[GenerationRequest], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    images = [image for request in requests for image in request.images]
    if not images or facts.image_token is None:
        return {}
    patches = np.concatenate([image.pixel_values for image in images])
    grids = np.array([image.grid_thw for image in images], np.int64)
    return image_inputs(patches, grids, ids.numpy(), facts.image_token)


class DecodingBatch:
    """Rows that are generated together: `step` until it returns false.

    Args:
        model: a transformers causal language model.
        prompts: of the rows, on the model's device.
        sampler: chooses the tokens.
        max_new_tokens: of each row.
        end_ids: tokens that end a row.
        searches: of each row, for its stop strings; empty: there are none.
        experts: routers of the model, which record the experts of each token; None: they do not.

    Attributes:
        made: tokens that each row has got, unless it has ended.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        sampler: Sampler,
        *,
        max_new_tokens: int,
        end_ids: Sequence[int],
        searches: Sequence[StopSearch] = (),
        experts: ExpertRouting | None = None,
    ) -> None:
        self._model, self._sampler = model, sampler
        self._prompts, self._searches = prompts, searches
        device = prompts.source.device
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=device)
        self._may_end = bool(end_ids or searches)
        # those of rows that can't end are 0, which needs no device
        self._lengths = torch.zeros(len(prompts.source), dtype=torch.int64, device=device if self._may_end else "cpu")
        self._rows = torch.arange(len(prompts.source), device=device)  # the request of each row still in the batch
        self._alive = torch.ones(len(self._rows), dtype=torch.bool, device=device)
        self._cache: Any = new_cache(model.config, prompts.ids.shape[1] + max_new_tokens)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._tokens = torch.zeros((len(self._rows), max_new_tokens), dtype=torch.int64, device=device)
        self._log_probs = torch.zeros((len(self._rows), max_new_tokens), device=device)
        self._kept = KeptSteps(len(self._rows))
        self._routed = None if experts is None else RoutedSteps(experts, prompts.source, prompts.real, max_new_tokens)
        self.made = 0
        self._by_hand, self._multiple = decodes(model, self._cache), row_multiple(device)
        self._mask: torch.Tensor | None = None
        if prompts.attention_mask is not None:
            responses = torch.ones((len(self._rows), max_new_tokens), dtype=torch.int64, device=device)
            self._mask = torch.cat([prompts.attention_mask[prompts.source], responses], dim=-1)
            if self._by_hand:
                added = torch.zeros(self._mask.shape, dtype=model.dtype, device=device)
                self._mask = added.masked_fill_(self._mask == 0, -math.inf)
        self._positions = prompts.position_ids.amax(0) if prompts.position_ids.ndim == 3 else prompts.position_ids
        self._positions = self._positions[prompts.source].amax(-1, keepdim=True)

    def step(self) -> bool:
        """Generate the next token of each row; returns whether a row needs another one."""
        with torch.inference_mode():
            with nullcontext() if self._routed is None else self._routed.recording(self._rows, self.made):
                logits = self._decode(self.made) if self.made else self._prefill()
            ended = self._choose(logits, self.made)
        self.made += 1
        return not ended and self.made < self._tokens.shape[1]

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What was generated.

        Returns:
            tokens: int64 [B, made]; those after the end of a row have no meaning.
            log_probs: float32 [B, made].
            lengths: int64 [B], tokens of each row that has ended, 0 for the others.
        """
        return self._tokens[:, : self.made], self._log_probs[:, : self.made], self._lengths

    def kept_sets(self) -> Sequence[KeptSets | None]:
        """The tokens from which those of each request were sampled; None: from all."""
        return self._kept.of_each()

    def routed(self, row: int, tokens: int) -> ExpertIds | None:
        """The experts of the prompt of a request and its first `tokens` tokens, without the last
        one; None: they were not recorded.
        """
        return self._routed.of(row, tokens) if self._routed is not None and tokens else None

    def _prefill(self) -> torch.Tensor:
        prompts = self._prompts
        logits = self._forward(
            prompts.ids, prompts.attention_mask, prompts.position_ids, is_first_iteration=True, **prompts.images
        )
        self._cache.reorder_cache(prompts.source)
        return logits[prompts.source]

    def _decode(self, step: int) -> torch.Tensor:
        """Logits of the token after number `step`."""
        positions = self._positions + step
        tokens = self._tokens[self._rows, step - 1, None]
        mask = None if self._mask is None else self._mask[:, : self._prompts.ids.shape[1] + step]
        if self._by_hand:
            mask = None if mask is None else mask[:, None, None]
            return next_logits(self._model, self._cache, tokens, positions, mask)
        if self._prompts.position_ids.ndim == 3:
            positions = positions.expand(3, -1, -1)
        return self._forward(tokens, mask, positions)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        if self._takes_positions:
            arguments["position_ids"] = positions
        inputs = self._model.prepare_inputs_for_generation(
            ids, past_key_values=self._cache, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments
        )
        return self._model(**inputs).logits[:, -1]

    def _choose(self, logits: torch.Tensor, step: int) -> bool:
        """Choose one token for each row; true if no row needs another."""
        tokens, log_probs, kept = self._sampler(logits, self._rows, step)
        if kept is not None:
            self._kept.add(self._rows.cpu().numpy(), kept.cpu().numpy())
        self._tokens[self._rows, step] = tokens
        self._log_probs[self._rows, step] = log_probs
        if self._may_end:
            ended = torch.isin(tokens, self._end_ids)
            if self._searches:
                ended |= self._completed(tokens)
            before = self._lengths[self._rows]
            self._lengths[self._rows] = torch.where(ended & self._alive, step + 1, before)
            self._alive &= ~ended
            left = int(self._alive.sum())
            if not left:
                return True
            more = -left % self._multiple if left > self._multiple else 0
            if (len(self._alive) - left - more) * LEAVE >= len(self._alive):
                self._drop_finished(more)
        return False

    def _completed(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B]: whether the token completes a stop string of its row."""
        rows = zip(self._rows.tolist(), tokens.tolist(), strict=True)
        return torch.tensor([self._searches[row].completed_by(token) for row, token in rows], device=tokens.device)

    def _drop_finished(self, spared: int) -> None:
        """Have finished rows leave the batch, but for so many."""
        stays = self._alive
        if spared:
            stays = stays.clone()
            stays[torch.nonzero(~stays)[:spared, 0]] = True
        order = keep_rows(stays)
        self._cache.reorder_cache(order)
        self._rows, self._positions = self._rows[order], self._positions[order]
        self._mask = self._mask[order] if self._mask is not None else None
        self._alive = self._alive[order]
