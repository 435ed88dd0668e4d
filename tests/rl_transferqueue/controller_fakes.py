"""Fakes for the reactor, the storage units, and the replies of a controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl_protocol.errors import RLError
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.messages import Answer, Done, UnitRequest
from rl_transferqueue.wire.spans import Span


def no_fetch(block: Span, nbytes: int, fetched: object) -> None:
    """`RemoteBlocks.fetch` of a plane without units of other hosts."""
    raise AssertionError(f"{nbytes} bytes of {block} are on this host")


class FakeTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeReactor:
    """Records callbacks and timers; tests run them."""

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[], None]] = {}
        self.timers: list[tuple[float, Callable[[], None], FakeTimer]] = []

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        self.timers.append((seconds, callback, timer))
        return timer


class FakeUnits:
    """Storage units that record requests; a test answers them with `reply`."""

    def __init__(self, count: int = 1) -> None:
        self.units = list(range(count))
        self.sent: list[tuple[int, UnitRequest, Callable[[Answer], None]]] = []

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[int]:
        return iter(self.units)

    def __contains__(self, unit: object) -> bool:
        return unit in self.units

    def send(self, unit: int, request: UnitRequest, callback: Callable[[Answer], None]) -> None:
        self.sent.append((unit, request, callback))

    def keep_ahead(self, high_water: Callable[[int], int]) -> None:
        for unit in self.units:
            high_water(unit)

    def reply(self, answer: Answer | None = None) -> UnitRequest:
        """Answer the oldest request and return that request."""
        _, request, callback = self.sent.pop(0)
        callback(answer if answer is not None else Done())
        return request


class FakeReplies:
    """Records answers and errors in the order in which they are sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Caller, Answer | RLError]] = []

    def answer(self, caller: Caller, body: Answer) -> None:
        self.sent.append((caller, body))

    def fail(self, caller: Caller, error: RLError) -> None:
        self.sent.append((caller, error))

    def take(self) -> list[tuple[Caller, Answer | RLError]]:
        out, self.sent = self.sent, []
        return out
