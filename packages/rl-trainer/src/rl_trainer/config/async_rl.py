"""Options of asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option, require

ON_UPDATE = ("finish", "continue", "abort")
ORDER = ("in_order", "ready_first")
WHEN_STALE = ("wait", "drop")


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(Options):
    """How far generation may run ahead of training."""

    max_staleness: int = option(
        0,
        "most versions between the weights that generated a response and those it trains. 0: generate, then train. "
        "1: generate the next batch while training on this one; more: further batches ahead",
        ge=0,
    )
    depth: int = option(
        0,
        "steps that generation runs ahead of training, which is the usual staleness: at most max_staleness; 0: max_staleness",
        ge=0,
        needs="max_staleness>0",
    )
    max_inflight_prompts: int = option(
        0,
        "prompts that are generated at once, each in a call of its own to the replica with the least work, also across steps; "
        "0: those of all admitted steps, each step's divided over the replicas",
        ge=0,
        needs="max_staleness>0",
    )

    on_update: str = option(
        "finish",
        "responses that are being generated when the weights change: finish (the update waits for them), continue (the new weights "
        "continue them after the tokens that they have; the oldest token counts for max_staleness), abort (the new weights start them again)",
        choices=ON_UPDATE,
        needs="max_staleness>0",
    )
    order: str = option(
        "in_order",
        "which groups a step trains on: in_order (its own prompts, in the order of the data), ready_first (the first of all admitted groups "
        "that are ready; each prompt is generated alone). With when_stale=wait a depth below max_staleness leaves room to overtake slow ones",
        choices=ORDER,
        needs="max_staleness>0",
    )
    when_stale: str = option(
        "wait",
        "how max_staleness holds for groups that others overtake: wait (a step waits for them while they can be trained in time), drop "
        "(no step waits; a group that would become too old is dropped before the weights change, and its prompt generated again, which "
        "favors short responses)",
        choices=WHEN_STALE,
        needs="order=ready_first",
    )

    def check(self, path: str) -> None:
        require(
            self.depth <= self.max_staleness,
            f"{path}depth",
            f"at most {path}max_staleness={self.max_staleness}",
            self.depth,
        )

    @property
    def steps_ahead(self) -> int:
        """Steps that generation runs ahead of training."""
        return self.depth or self.max_staleness
