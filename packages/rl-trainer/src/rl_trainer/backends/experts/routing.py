"""The experts that the routers of a transformers model choose: recorded, or given to them.

Router replay of mixture-of-experts policies: R3 replays the experts of the rollout engine
(arXiv:2510.11370, section 3.2), R2 those of the trainer's own pass before the update
(arXiv:2512.01374, section 3.3). The weights of the replayed experts are computed from the logits of
the router in the pass itself, so that the router gets its gradient.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from rl_protocol import ConfigError
from rl_trainer.data.model_families import ROUTED_FAMILIES


class ExpertRouting:
    """The routers of a model, in the order of its layers.

    Args:
        model: a transformers causal language model; its forward passes are changed from now on.

    Attributes:
        layers: layers that have experts.
        top_k: experts of a token in each of them.

    Raises:
        ConfigError: the model is of no family whose routers are known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        routers: list[Any] = [module for module in model.modules() if type(module).__name__ in ROUTED_FAMILIES.values()]
        if not routers:
            raise ConfigError(
                f"Router replay needs a model with experts of the families {', '.join(ROUTED_FAMILIES)}; got {type(model).__name__}. "
                "Set AlgorithmConfig.router_replay to disabled."
            )
        self.layers, self.top_k = len(routers), int(routers[0].top_k)
        self._given: torch.Tensor | None = None
        self._chosen: list[torch.Tensor | None] | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def replay(self, given: torch.Tensor | None) -> None:
        """Set the experts of the next forward pass, and of its recomputation in the backward pass.

        Args:
            given: int [tokens, layers, top_k], for all places of the input in their order; where
                they are -1, and for None everywhere, the routers choose.
        """
        self._given = given

    @contextmanager
    def recording(self) -> Generator[list[torch.Tensor | None]]:
        """Record the experts of the last forward pass [tokens, top_k] of each layer in the list."""
        chosen: list[torch.Tensor | None] = [None] * self.layers
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def _hook(self, layer: int) -> Any:
        def routed(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            logits, weights, chosen = output
            if self._given is not None:
                given = self._given[:, layer]
                chosen = torch.where(given < 0, chosen, given)
                weights = _weights(router, logits, chosen).to(weights.dtype)
            if self._chosen is not None:
                self._chosen[layer] = chosen
            return None if self._given is None else (logits, weights, chosen)

        return routed


def _weights(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, top_k], the weights of experts [tokens, top_k], as the router's `forward`
    computes those of the experts that it chooses.
    """
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such setting, and always does
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights
