"""Experts that are given to the routers of a model (R3, arXiv:2510.11370), or that they chose
(R2, arXiv:2512.01374).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.model.gpt import first_layer
from rl_megatron_peft.backend.parallel import Ranks, all_gather_tensor_parallel, broadcast_from_stage
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_protocol import BatchData, RaggedColumn, pack_arrays
from rl_protocol.batch.routed_experts import ExpertIds
from rl_protocol.rl_columns import ROUTED
from rl_protocol.routed_tokens import computed_lengths, experts_at_places


class RouterReplay:
    """Makes the router of a layer take given experts.

    Replaces Megatron's class of this name, which needs given experts for every token. The weights
    of the experts are computed from the router's own logits.

    Attributes:
        given: int64 [tokens, K], the experts of the next forward pass; -1, or None everywhere: the
            router chooses.
        used: int64 [tokens, K], the experts of the last forward pass.
    """

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        self.used: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers [tokens, K] of the experts of scores [tokens, experts]."""
        values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.given is None:
            self.used = chosen
            return values, chosen
        self.used = chosen = torch.where(self.given < 0, chosen, self.given)
        return scores.gather(1, chosen), chosen


class ExpertReplay:
    """The routers of this rank's layers, which take the experts of the rows that have some.

    Args:
        model: this rank's stage of a model with experts.
        shape: of the whole model.
        ranks: place of this process.
    """

    def __init__(self, model: GPTModel, shape: ModelShape, ranks: Ranks) -> None:
        self._first, self._ranks = first_layer(shape, ranks), ranks
        self._routers = list[RouterReplay]()
        layers: list[Any] = list(cast(Any, model.decoder).layers)
        for layer in layers:
            layer.mlp.router.router_replay = RouterReplay()
            self._routers.append(layer.mlp.router.router_replay)

    def set(self, micro: BatchData | None, width: int) -> None:
        """Set the experts of the next forward pass.

        Args:
            micro: its rows, with ROUTED_COLUMNS where their experts are given; None: padding.
            width: places of each row, padded on the right.

        Raises:
            BatchError: the experts of a row do not fit its tokens, or the layers of the model.
        """
        placed = None if micro is None else experts_at_places(micro, width)
        if placed is None:
            for router in self._routers:
                router.given = None
            return
        tokens = torch.from_numpy(placed).transpose(0, 1)  # Megatron has places before rows
        if self._ranks.layout.sequence_parallel:
            tokens = tokens.chunk(self._ranks.layout.tensor)[self._ranks.tensor]
        layers = tokens.flatten(0, 1).to(self._ranks.device, torch.int64).unbind(1)
        for number, router in enumerate(self._routers, self._first):
            router.given = layers[number]

    def used(self) -> torch.Tensor:
        """int32 [places * rows, layers, K], the experts of this rank's tokens and layers in the
        last forward pass, places before rows.
        """
        return torch.stack([router.used for router in self._routers if router.used is not None], 1).to(torch.int32)

    def columns(self, micro_batches: Sequence[BatchData], used: Sequence[torch.Tensor]) -> dict[str, RaggedColumn]:
        """Return ROUTED_COLUMNS of forward passes; a collective over the ranks of a replica.

        Args:
            micro_batches: the rows of each pass.
            used: what the method `used` returned after each.
        """
        rows = list[list[ExpertIds]]()
        for micro, part in zip(micro_batches, used, strict=True):
            placed = self._of_all_ranks(part).unflatten(0, (-1, len(micro))).to(torch.int16).cpu().numpy()
            rows += [[placed[:tokens, row]] for row, tokens in enumerate(computed_lengths(micro))]
        return pack_arrays(ROUTED, rows, ndim=3, dtype="int16")

    def _of_all_ranks(self, used: torch.Tensor) -> torch.Tensor:
        """[places * rows, layers, K] of all tokens and all layers of the model."""
        layout = self._ranks.layout
        own = all_gather_tensor_parallel(used, 0 if layout.sequence_parallel else None).contiguous()
        stages = (
            broadcast_from_stage(own if stage == self._ranks.pipeline else torch.empty_like(own), stage)
            for stage in range(layout.pipeline)
        )
        return torch.cat(list(stages), 1)
