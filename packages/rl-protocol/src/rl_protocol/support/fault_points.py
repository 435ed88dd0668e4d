"""Named points of the code at which a test kills or delays a process, or changes a byte; off unless
ARMED is in its environment.

The points lie between two steps of a protocol that a crash must not separate. `rl chaos` arms one
of them for a run.
"""

from __future__ import annotations

import os
import signal
import time
from enum import StrEnum
from functools import cache
from pathlib import Path

ARMED = "RL_FAULT_POINT"
"""Environment variable: POINT:PASSES:EFFECT:FILE. A process that reaches the point for that time
makes the file. EFFECT is `kill` or `flip`, for the first of all processes that reaches it, or the
seconds that a process sleeps then and whenever it reaches the point again."""


class FaultPoint(StrEnum):
    """Where a process can be killed or delayed, or a byte changed."""

    JOURNAL_APPENDED = "journal appended"
    """Controller: records are written but not synced."""
    JOURNAL_PAYLOAD_SYNCED = "payload synced"
    """Controller: the payload is durable, but the metadata that names it is not."""
    JOURNAL_COMMITTED = "journal committed"
    """Controller: records are durable, before any client is answered."""
    ROWS_IN_MEMORY = "rows in memory"
    """Controller: a put is durable and can be read, and its client has no answer."""
    SESSIONS_STORED = "sessions stored"
    """Rollout: trajectories are stored, and their sessions are not settled."""
    SESSIONS_SETTLED = "sessions settled"
    """Rollout: sessions are settled, and the driver has no answer."""
    GROUPS_HALF_CLEARED = "groups half cleared"
    """Driver: settled sessions of committed groups are cleared, and their trajectories are not."""
    STATE_WRITTEN = "state written"
    """Trainer or reward: its files of a checkpoint are durable, and the driver has no answer."""
    CHECKPOINT_SEALED = "checkpoint sealed"
    """Driver: the checkpoint is complete, under its hidden name."""
    CHECKPOINT_PUBLISHED = "checkpoint published"
    """Driver: the checkpoint has its name, and the rows that it has trained are kept."""
    WEIGHTS_SENT = "weights sent"
    """Trainer: all weights are hashed and in shared memory, and no rollout has read them."""
    LEASE_CLOCK_READ = "lease clock read"
    """Driver: it reads the clock of its leases, which jumps by the seconds of the effect."""


class _Armed:
    def __init__(self, point: FaultPoint, passes: int, effect: str, file: Path) -> None:
        self.point = point
        self.passes = passes
        self.effect = effect
        self.file = file


@cache
def _armed() -> _Armed | None:
    if ARMED not in os.environ:
        return None
    point, passes, effect, file = os.environ[ARMED].split(":", 3)
    return _Armed(FaultPoint(point), int(passes), effect, Path(file))


def armed_for(
    point: FaultPoint, passes: int, file: Path, *, seconds: float = 0.0, flips: bool = False
) -> dict[str, str]:
    """The environment that has a process killed, delayed, or a byte changed, when it reaches a
    point.

    Args:
        point: of the code.
        passes: at which time, from 1.
        file: made then.
        seconds: how long it sleeps at this and all later times; 0: it does not.
        flips: it changes a byte, at a point that has bytes; otherwise, and without `seconds`, it is
            killed.
    """
    effect = "flip" if flips else str(seconds) if seconds else "kill"
    return {ARMED: f"{point}:{passes}:{effect}:{file}"}


def reach(point: FaultPoint, memory: memoryview | None = None) -> None:
    """Mark a point of the code; if it is armed, kill or delay this process, or change a byte.

    Args:
        point: of the code.
        memory: the bytes that are on their way here, uint8 and writable.
    """
    armed = _armed()
    if armed is None or armed.point is not point:
        return
    armed.passes -= 1
    if armed.effect not in ("kill", "flip"):
        if armed.passes <= 0:
            armed.file.touch()
            time.sleep(float(armed.effect))
    elif armed.passes == 0:
        try:
            armed.file.touch(exist_ok=False)
        except FileExistsError:
            return
        if armed.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert memory is not None
        memory[len(memory) // 2] ^= 0x10


def lease_clock() -> float:
    """Seconds of the monotonic clock, for leases; it jumps ahead where LEASE_CLOCK_READ is
    armed."""
    armed, now = _armed(), time.monotonic()
    if armed is None or armed.point is not FaultPoint.LEASE_CLOCK_READ:
        return now
    armed.passes -= 1
    if armed.passes > 0:
        return now
    armed.file.touch()
    return now + float(armed.effect)
