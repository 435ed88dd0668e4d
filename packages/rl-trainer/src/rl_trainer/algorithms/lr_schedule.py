"""Learning-rate schedules."""

from __future__ import annotations

import math


def lr_factor(kind: str, step: int, *, warmup: int, decay: int, least: float) -> float:
    """Fraction of the configured learning rate at optimizer step `step` (the first is 1).

    Increases linearly to 1 over `warmup` steps, then decreases to `least` at step `decay` and stays
    there. With "constant" it stays at 1.

    >>> [lr_factor("linear", step, warmup=2, decay=6, least=0.5) for step in (1, 2, 4, 6, 9)]
    [0.5, 1.0, 0.75, 0.5, 0.5]
    """
    if step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    progress = min((step - warmup) / (decay - warmup), 1.0)
    remaining = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return least + (1 - least) * remaining
