"""The controller's connections to all storage units, and the host of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

from rl_protocol.support.host_identity import this_host
from rl_transferqueue.controller.unit_channels import NetworkChannels, UnixChannels
from rl_transferqueue.controller.unit_link import UnitLink
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.messages import Answer, AwaitEnd, UnitRequest
from rl_transferqueue.wire.process_liveness import ProcessId

log = logging.getLogger(__name__)


class StorageUnits:
    """The storage units that run, by number.

    Args:
        addresses: unix sockets of those of this host; empty: the unit has ended.
        segment: bytes of memory that a unit touches ahead of need, in one step.
        on_lost: called with the number of a unit that has ended; the unit is not in the collection
            any more.
    """

    def __init__(
        self, reactor: Reactor, addresses: Sequence[str], segment: int, on_lost: Callable[[int], None]
    ) -> None:
        self._on_lost = on_lost
        self._reactor = reactor
        self._segment = segment
        self._on_ready: Callable[[], None] | None = None
        self._links: dict[int, UnitLink] = {}
        self._hosts: dict[int, str] = {}
        self._places: dict[int, str] = {}
        """Addresses, for messages."""
        self._awaited: dict[int, dict[int, tuple[ProcessId, Callable[[], None]]]] = {}
        """Ends of processes that a unit watches."""
        self._waits = count()
        for unit, address in enumerate(addresses):
            if address:
                self._add(unit, UnixChannels(reactor, address), this_host(), address)

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

    def join(self, number: int, unit: UnitAddress, key: PlaneKey) -> None:
        """Connect to a running unit of another host, and wait for its part of the handshake.

        Raises:
            PlaneLostError, PlaneTimeout, ConfigError: it can't be reached, or has another key.
        """
        self._add(number, NetworkChannels(self._reactor, unit, f"storage unit {number}", key), unit.host, unit.bulk)

    def when_ended(self, host: str, process: ProcessId, callback: Callable[[], None]) -> None:
        """Call back once a process of another host can't touch the memory of units there any more:
        it has ended, or the units have."""
        unit = next((unit for unit, its in self._hosts.items() if its == host), None)
        if unit is None:
            callback()
            return
        wait = next(self._waits)
        self._awaited.setdefault(unit, {})[wait] = process, callback

        def ended(_: Answer) -> None:
            del self._awaited[unit][wait]
            callback()

        self.send(unit, AwaitEnd(process), ended)

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
        log.error(
            "storage unit %d at %s has ended; rows in it are lost unless a journal has them",
            unit,
            self._places.pop(unit),
        )
        self._links.pop(unit).close()
        host = self._hosts.pop(unit)
        self._on_lost(unit)
        for process, callback in self._awaited.pop(unit, {}).values():
            self.when_ended(host, process, callback)

    def _add(self, unit: int, channels: UnixChannels | NetworkChannels, host: str, place: str) -> None:
        self._links[unit] = UnitLink(
            self._reactor, channels, self._segment, self._check_ready, partial(self._lose, unit)
        )
        self._hosts[unit] = host
        self._places[unit] = place
