"""Learning rates over the optimizer steps of a run."""

from __future__ import annotations

import math

LR_SCHEDULES = ("constant", "linear", "cosine")


def lr_factor(kind: str, step: int, *, warmup: int, decay: int, least: float) -> float:
    """Share of the configured learning rate at optimizer step `step` (the first is 1).

    It rises linearly over `warmup` steps to 1, then falls to `least` at step `decay` and stays there; with "constant" it stays at 1.

    >>> [lr_factor("linear", step, warmup=2, decay=6, least=0.5) for step in (1, 2, 4, 6, 9)]
    [0.5, 1.0, 0.75, 0.5, 0.5]
    """
    if step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    progress = min((step - warmup) / (decay - warmup), 1.0)
    falls = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return least + (1 - least) * falls
