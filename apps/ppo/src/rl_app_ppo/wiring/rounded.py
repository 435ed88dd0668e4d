"""Weights in the element type that the rollout computes in. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_protocol import WeightTensor
from rl_protocol.ports import WeightSender
from rl_protocol.torch import TORCH_DTYPES, from_weight, to_weight


class Rounded:
    """WeightSender over another one: tensors of floating point are rounded to the nearest of `dtype`, others pass as they are.

    Args:
        source: trains in a type of its own, and keeps it.
        dtype: name of the element type.
    """

    def __init__(self, source: WeightSender, dtype: str) -> None:
        self._source = source
        self._dtype = TORCH_DTYPES[dtype]

    def named_weights(self) -> Iterator[WeightTensor]:
        """See rl_protocol.ports.WeightSender."""
        for weight in self._source.named_weights():
            tensor = from_weight(weight)
            yield to_weight(weight.name, tensor.to(self._dtype)) if tensor.is_floating_point() else weight
