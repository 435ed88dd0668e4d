"""The controller's connections to all storage units."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rl_transferqueue.controller.unit_link import UnitLink
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.wire.messages import Answer, UnitRequest

log = logging.getLogger(__name__)


class StorageUnits:
    """The storage units that run, by number.

    Args:
        segment: bytes of memory that a unit touches ahead of need, in one step.
        on_lost: called with the number of a unit that has ended; the unit is not in the collection
            any more.
    """

    def __init__(
        self, reactor: Reactor, addresses: Sequence[str], segment: int, on_lost: Callable[[int], None]
    ) -> None:
        self._on_lost = on_lost
        self._on_ready: Callable[[], None] | None = None
        self._links = {
            unit: UnitLink(reactor, address, segment, self._check_ready, partial(self._lose, unit))
            for unit, address in enumerate(addresses)
        }

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def __contains__(self, unit: object) -> bool:
        return unit in self._links

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once, when all units are connected: from then on the end of each is noticed."""
        self._on_ready = callback
        self._check_ready()

    def send(self, unit: int, request: UnitRequest, callback: Callable[[Answer], None]) -> None:
        """Send a request to a unit that runs; `callback` gets its answer."""
        self._links[unit].send(request, callback)

    def keep_ahead(self, high_water: Callable[[int], int]) -> None:
        """Have every unit touch its memory some way beyond its first `high_water(unit)` bytes."""
        for unit, link in self._links.items():
            link.keep_ahead(high_water(unit))

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()

    def _check_ready(self) -> None:
        if self._on_ready is not None and all(link.connected for link in self._links.values()):
            callback, self._on_ready = self._on_ready, None
            callback()

    def _lose(self, unit: int) -> None:
        log.error("storage unit %d has ended; its data is lost", unit)
        self._links.pop(unit).close()
        self._on_lost(unit)
