"""Key-value cache with memory for all tokens of a batch, whose rows can leave it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Keys and values of a layer with full attention, written in place.

    The first `update` takes the prompts as they are. The first `reorder_cache` copies them, once
    per response, to memory for `capacity` tokens; later ones move only rows that change their
    place, and return no memory.

    Args:
        capacity: most tokens of a row, prompt and response.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token to each row; returns all keys and values."""
        del args, kwargs  # the base class has them for other kinds of layers
        if self._memory is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        start = self._held()[0].shape[-2]
        end = start + key_states.shape[-2]
        keys, values = (memory[: len(key_states), ..., :end, :] for memory in self._memory)
        keys[..., start:, :] = key_states
        values[..., start:, :] = value_states
        self.keys, self.values = keys, values
        return keys, values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; there are at most as many rows as before, after
        the first call."""
        held = self._held()
        if self._memory is None:
            self._memory = (self._spread(held[0], beam_idx), self._spread(held[1], beam_idx))
        else:
            moved = torch.nonzero(beam_idx != torch.arange(len(beam_idx), device=beam_idx.device))[:, 0]
            for rows in held:
                rows[moved] = rows[beam_idx[moved]]
        length = held[0].shape[-2]
        self.keys, self.values = (memory[: len(beam_idx), ..., :length, :] for memory in self._memory)

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _spread(self, prompts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        *middle, length, size = prompts.shape[1:]
        memory = prompts.new_empty((len(rows), *middle, self._capacity, size))
        memory[..., :length, :] = prompts[rows]
        return memory


def new_cache(config: Any, capacity: int) -> DynamicCache:
    """An empty cache for a model; layers of other kinds than full attention are transformers' own.

    Args:
        config: of the model.
        capacity: most tokens of a row, prompt and response.
    """
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep_rows(alive: torch.Tensor) -> torch.Tensor:
    """int64 [number of true]: order of the rows that stay, of which as few as possible move.

    Rows behind the new end take the places of those that leave.

    Args:
        alive: bool [B].

    Example:
        >>> keep_rows(torch.tensor([True, False, True, False, True])).tolist()
        [0, 4, 2]
    """
    kept = int(alive.sum())
    order = torch.arange(kept, device=alive.device)
    order[~alive[:kept]] = kept + torch.nonzero(alive[kept:])[:, 0]
    return order
