"""Options of asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(Options):
    """How far generation may run ahead of training."""

    max_staleness: int = option(
        0,
        "most versions between the weights that generated a response and those it trains. 0: generate, then train. "
        "1: generate the next batch while training on this one; more: further batches ahead. A weight update waits for "
        "the running generation",
        ge=0,
    )
