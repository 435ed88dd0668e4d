"""Options: what happens when a process of a run dies."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option, require

SHORTEST_S = 5.0
"""Least `heartbeat_s` with which a busy process is not taken for one that hangs."""


@dataclass(frozen=True, kw_only=True)
class RestartConfig(Options):
    """Processes that died, and their replacement."""

    max_per_hour: int = option(
        6,
        "limit per hour, beyond which the run fails: of new processes for each rollout worker, and for the controller of a data plane with a "
        "journal; and of restarts of the run after the death of any other process, or of a connection between ranks. 0: it fails at the first "
        "death",
        ge=0,
    )
    backoff_s: float = option(
        1.0,
        "wait before a restart, seconds; it doubles with each one within an hour, up to a minute",
        ge=0,
        needs="max_per_hour>0",
    )
    heartbeat_s: float = option(
        60.0,
        "seconds after which a process of the run, on any host, that is stopped or hangs in native code is killed and counts as died; time in a "
        "debugger counts, too; 0: never",
        ge=0,
    )

    def check(self, path: str) -> None:
        require(
            self.heartbeat_s == 0 or self.heartbeat_s >= SHORTEST_S,
            f"{path}heartbeat_s",
            f"0 or at least {SHORTEST_S:g}: processes beat once a second",
            self.heartbeat_s,
        )
