"""Requests, errors and bytes sent, counted by a server process."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_protocol.errors import RLError
from rl_transferqueue.wire.messages import OperationCount


@dataclass(slots=True)
class _Operation:
    requests: int = 0
    nanoseconds: int = 0
    longest: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class RequestCounters:
    """Requests by operation, errors by class, and bytes sent."""

    bytes_sent: int = 0
    _operations: dict[str, _Operation] = field(default_factory=dict[str, _Operation])
    _errors: dict[str, int] = field(default_factory=dict[str, int])

    def served(self, operation: str, nanoseconds: int, nbytes: int) -> None:
        """Count a request of `nbytes` bytes; `nanoseconds` is the server's time without waiting."""
        entry = self._operations.get(operation)
        if entry is None:
            entry = self._operations[operation] = _Operation()
        entry.requests += 1
        entry.nanoseconds += nanoseconds
        entry.longest = max(entry.longest, nanoseconds)
        entry.bytes_received += nbytes

    def failed(self, error: RLError) -> None:
        """Count a request that was answered with an error."""
        name = type(error).__name__
        self._errors[name] = self._errors.get(name, 0) + 1

    def operations(self) -> dict[str, OperationCount]:
        """By message type, in order of first use."""
        return {
            name: OperationCount(entry.requests, entry.nanoseconds, entry.longest, entry.bytes_received)
            for name, entry in self._operations.items()
        }

    def errors(self) -> dict[str, int]:
        """By class name."""
        return dict(self._errors)
