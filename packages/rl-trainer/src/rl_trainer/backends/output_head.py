"""Reads log-probs in place of a model's logits, so that no pass holds the logits of all tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from rl_protocol.kept_tokens import KeptTokens
from rl_trainer.algorithms.log_probs import linear_log_probs
from rl_trainer.data.images import FAMILIES
from rl_trainer.data.model_families import JOINED_FAMILIES
from rl_trainer.kernels.linear import OneDnnLinear

_AFTER_THE_LAYER = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of a model's configuration for what it does to the outputs of the layer."""


class OutputHead:
    """The output layer of a model, which gives log-probs where they are asked for.

    Args:
        layer: a linear layer, hidden states to logits.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._layer = layer

    @classmethod
    def of(cls, model: Any) -> OutputHead | None:
        """The head of a transformers model; None: its logits are not the output of a linear layer.

        So it is with adapters on the layer, scaled logits, and families that are not tested.
        """
        config, layer = model.config.get_text_config(), model.get_output_embeddings()
        tested = model.config.model_type in (*JOINED_FAMILIES, *FAMILIES)
        changed = any(getattr(config, name, None) not in (None, 1) for name in _AFTER_THE_LAYER)
        return cls(layer) if tested and not changed and type(layer) in (torch.nn.Linear, OneDnnLinear) else None

    @contextmanager
    def reading(
        self,
        places: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        *,
        squares: bool,
        top: int = 0,
        kept: KeptTokens | None = None,
    ) -> Generator[None]:
        """Within it, `logits` of the model's output are the result of `linear_log_probs`.

        Args:
            places: int64 [T], where the layer's inputs [rows, places, H] predict the tokens, as
                row * places + place.
            tokens, temperature, squares, top, kept: see `log_prob_columns`.
        """

        def forward(input: torch.Tensor) -> torch.Tensor:
            inputs = input.flatten(0, -2).index_select(0, places)
            weight, bias = self._layer.weight, self._layer.bias
            return linear_log_probs(inputs, weight, bias, tokens, temperature, squares=squares, top=top, kept=kept)

        self._layer.forward = forward
        try:
            yield
        finally:
            del self._layer.forward
