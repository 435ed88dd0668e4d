"""Has oneDNN compute linear layers of any size on any processor."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

from rl_trainer.kernels import linear as kernels


@contextmanager
def by_onednn() -> Generator[list[tuple[int, int]]]:
    """Within it, oneDNN computes every float32 product whose number of rows is a multiple of ROWS.

    Yields:
        The shapes [M, N] of its products so far.
    """
    shapes, compute = list[tuple[int, int]](), kernels._by_onednn

    def noting(inputs, weight, bias=None):
        shapes.append((len(inputs), len(weight)))
        return compute(inputs, weight, bias)

    with mock.patch.multiple(kernels, onednn_is_faster=lambda: True, LEAST=1, _by_onednn=noting):
        yield shapes
