"""What the controller keeps of one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rl_transferqueue.handouts import Handouts
from rl_transferqueue.reactor import Timer


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is answered later: `leave` undoes the waiting."""

    timer: Timer
    leave: Callable[[], None]


@dataclass(slots=True)
class Session:
    """One client, from its `Hello` to its `Bye` or its death."""

    pidfd: int
    """Of the client's process, or the socket of a client on another host: readable when the client is gone."""
    remote: bool
    name: str
    """Of the client, for people."""
    abandoned: int = 0
    """Spans it has given back while bytes for them may still have been on their way."""
    waiting: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    handouts: Handouts = field(default_factory=Handouts)
