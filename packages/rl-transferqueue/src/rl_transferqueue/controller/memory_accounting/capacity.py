"""The bytes of all units: free, reserved by a session, or committed. Pure: no memory is touched.

A session reserves a range, writes to it, commits parts of it as blocks, in any order, and gives
back the rest. What a session has reserved and not committed is freed when it ends, so a client that
dies leaks no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_protocol.errors import BatchError, CapacityTimeout, PlaneLostError, WireError
from rl_transferqueue.controller.memory_accounting.allocator import Allocator
from rl_transferqueue.controller.memory_accounting.occupancy import Occupancy
from rl_transferqueue.wire.spans import ALIGN, Span, most_spare, rounded

_SPARE_FREE = 2
"""Ranges are reserved ahead of need only while this part of each unit stays free."""


_NAMED = 4
"""Units whose free memory a message names."""


def no_units() -> PlaneLostError:
    """The error of a put when no unit is left."""
    return PlaneLostError("All storage units of the data plane have ended; its data is lost.")


@dataclass(slots=True)
class _Gap:
    """Reserved bytes start..stop of a unit that are not committed."""

    unit: int
    start: int
    stop: int


@dataclass(slots=True)
class Capacity:
    """Memory of units of equal `capacity` bytes (a multiple of 64).

    Attributes:
        units: how many there are at first.
        host: theirs; units that join have others.

    >>> capacity = Capacity(2, 1024)
    >>> span = capacity.reserve(b"s", 100)
    >>> capacity.commit(b"s", Span(span.unit, span.offset, 64))
    >>> capacity.end_session(b"s"), capacity.used
    (None, 64)
    """

    units: int
    capacity: int
    host: str = ""
    _hosts: dict[int, str] = field(init=False)
    _free: dict[int, Allocator] = field(init=False)
    _gaps: dict[bytes, list[_Gap]] = field(init=False, default_factory=dict[bytes, list[_Gap]])
    _pinned: dict[tuple[bytes, Span], bool] = field(init=False, default_factory=dict[tuple[bytes, Span], bool])
    """Ranges of puts under way -> whether their sessions have not given them back."""
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._free = {unit: Allocator(self.capacity) for unit in range(self.units)}
        self._hosts = dict.fromkeys(self._free, self.host)

    def join(self, unit: int, host: str) -> None:
        """Another unit, on that host."""
        self._free[unit], self._hosts[unit] = Allocator(self.capacity), host

    @property
    def used(self) -> int:
        """Bytes that are committed or reserved."""
        return sum(unit.used for unit in self._free.values())

    @property
    def total(self) -> int:
        """Bytes of all running units."""
        return self.capacity * len(self._free)

    @property
    def here(self) -> int:
        """Bytes of the running units on the controller's host."""
        return self.capacity * sum(map(self.is_here, self._free))

    @property
    def running(self) -> tuple[int, ...]:
        """Units that run."""
        return tuple(self._free)

    @property
    def hosts(self) -> Mapping[int, str]:
        """Host of each unit that runs, or has."""
        return self._hosts

    def runs(self, unit: int) -> bool:
        """Whether the unit has not ended."""
        return unit in self._free

    def is_here(self, unit: int) -> bool:
        """Whether a unit runs, or has run, on the controller's host."""
        return self._hosts[unit] == self.host

    def high_water(self, unit: int) -> int:
        """End of the highest range ever taken."""
        return self._free[unit].high_water if unit in self._free else 0

    def reserve(self, session: bytes, nbytes: int, host: str = "") -> Span | None:
        """Reserve at least `nbytes` bytes, round-robin over units with room, those of `host` first;
        None: no unit has room.

        Raises:
            BatchError: no unit could ever hold it.
            PlaneLostError: no unit runs.
        """
        self.check_size(nbytes)
        self._turn += 1
        order = list(self._free)
        turn = self._turn % len(order)
        for unit in self._near_first((*order[turn:], *order[:turn]), host):
            span = self.take(unit, nbytes)
            if span is not None:
                self._gaps.setdefault(session, []).append(_Gap(unit, span.offset, span.offset + span.nbytes))
                return span
        return None

    def check_size(self, nbytes: int) -> None:
        """Raise what `reserve` raises where no free memory would help."""
        if not self._free:
            raise no_units()
        if rounded(nbytes) > self.capacity:
            raise BatchError(
                f"A block of {nbytes} bytes can never fit a storage unit of {self.capacity} bytes: put fewer rows at a "
                "time, or raise TransferQueueConfig.capacity_mb or lower TransferQueueConfig.num_storage_units."
            )

    def check_here(self, nbytes: int) -> None:
        """Raise an error if `take_here` can never return such a range.

        Raises:
            BatchError: no unit could ever hold it.
            PlaneLostError: no unit runs there.
        """
        self.check_size(nbytes)
        if not any(map(self.is_here, self._free)):
            raise PlaneLostError(
                "All storage units on the host of the controller have ended: rows that the journal alone has can't be read."
            )

    def spare(self, session: bytes, nbytes: int, host: str = "") -> Span | None:
        """Reserve a range for later puts of a host while memory is plentiful."""
        if rounded(nbytes) > most_spare(self.capacity):
            return None
        if any(unit.used > self.capacity - self.capacity // _SPARE_FREE for unit in self._free.values()):
            return None
        return self.reserve(session, nbytes, host)

    def check(self, session: bytes, span: Span) -> None:
        """Raise WireError unless the range is reserved by the session and not committed."""
        if span.offset % ALIGN or span.nbytes % ALIGN or not span.nbytes:
            raise WireError(f"{span} is not aligned to {ALIGN} bytes.")
        if span.unit not in self._free:
            raise PlaneLostError(f"Storage unit {span.unit} of the data plane has ended; repeat the put.")
        if self._find(session, span) is None:
            raise WireError(f"{span} is not reserved by this session.")

    def commit(self, session: bytes, span: Span) -> None:
        """The range, which passed `check`, becomes a block; `give` frees it."""
        self._carve(session, span)

    def pin(self, session: bytes, span: Span) -> None:
        """A put of the range, which passed `check`, is under way: until `unpin` the range is not
        free, also if the session gives it back or ends."""
        self._carve(session, span)
        self._pinned[session, span] = True

    def unpin(self, session: bytes, span: Span, *, made: bool) -> None:
        """The put of a pinned range has ended. If it was made, the range is a block; else the
        session has reserved it again, or it is free if the session gave it back."""
        reserved = self._pinned.pop((session, span))
        if not made and reserved and span.unit in self._free:
            self._gaps.setdefault(session, []).append(_Gap(span.unit, span.offset, span.offset + span.nbytes))
        elif not made:
            self.give(span)

    def abandon(self, session: bytes, span: Span) -> None:
        """Free a range that the session has reserved and not committed; other ranges are
        ignored."""
        if (session, span) in self._pinned:
            self._pinned[session, span] = False
        elif span.nbytes and not (span.offset % ALIGN or span.nbytes % ALIGN) and self._carve(session, span):
            self.give(span)

    def take(self, unit: int, nbytes: int) -> Span | None:
        """A range of one unit for a block, outside of any session."""
        if unit not in self._free:
            return None
        start = self._free[unit].take(nbytes)
        return None if start is None else Span(unit, start, rounded(nbytes))

    def take_here(self, nbytes: int) -> Span | None:
        """A range as that of `take`, of the unit on the controller's host that has the most free
        memory."""
        units = sorted(filter(self.is_here, self._free), key=lambda it: self._free[it].used)
        return next((span for unit in units if (span := self.take(unit, nbytes)) is not None), None)

    def give(self, span: Span) -> None:
        """Free a committed block or a range of `take`; ignored if its unit has ended."""
        if span.unit in self._free:
            self._free[span.unit].give(span.offset, span.nbytes)

    def end_session(self, session: bytes) -> None:
        """Free what the session reserved and did not commit."""
        for gap in self._gaps.pop(session, ()):
            self.give(Span(gap.unit, gap.start, gap.stop - gap.start))
        for owner, span in self._pinned:
            if owner == session:
                self._pinned[owner, span] = False

    def reserved(self, session: bytes, unit: int) -> tuple[Span, ...]:
        """Ranges of a unit that the session has reserved and not committed."""
        gaps = self._gaps.get(session, ())
        pinned = (span for owner, span in self._pinned if owner == session and span.unit == unit)
        return (*(Span(unit, gap.start, gap.stop - gap.start) for gap in gaps if gap.unit == unit), *pinned)

    def holders(self) -> dict[bytes, int]:
        """session -> bytes it has reserved and not committed."""
        return {session: sum(gap.stop - gap.start for gap in gaps) for session, gaps in self._gaps.items()}

    def lose(self, unit: int) -> None:
        """A unit has ended with all its memory."""
        self._free.pop(unit, None)
        for session, gaps in list(self._gaps.items()):
            self._keep(session, [gap for gap in gaps if gap.unit != unit])

    def full(self, nbytes: int, timeout_s: float, held: Occupancy) -> CapacityTimeout:
        """The error of a put that waited `timeout_s` seconds for `nbytes` bytes."""
        free = self.total - self.used
        largest = max((unit.largest for unit in self._free.values()), default=0)
        return CapacityTimeout(
            f"A put needs {rounded(nbytes)} bytes; the storage units have {free} of {self.total} bytes available, {largest} in one piece, "
            f"and not enough became free within {round(timeout_s, 3):g} s. {held} Clear rows that are done with, or raise "
            "TransferQueueConfig.capacity_mb."
        )

    def room(self) -> str:
        """What each unit has, those with the largest free piece first, for messages.

        >>> capacity = Capacity(1, 1024)
        >>> capacity.take(0, 1000)
        Span(unit=0, offset=0, nbytes=1024)
        >>> capacity.room()
        'storage unit 0 holds 1024 of 1024 bytes (0 free, 0 in one piece)'
        """
        order = sorted(self._free.items(), key=lambda it: -it[1].largest)
        units = [
            f"storage unit {number} holds {unit.used} of {self.capacity} bytes ({self.capacity - unit.used} free, {unit.largest} in one piece)"
            for number, unit in order[:_NAMED]
        ]
        more = [f"{len(order) - _NAMED} more have less"] if len(order) > _NAMED else []
        return ", ".join([*units, *more])

    def _near_first(self, units: Sequence[int], host: str) -> Sequence[int]:
        return sorted(units, key=lambda unit: self._hosts[unit] != host)

    def _find(self, session: bytes, span: Span) -> _Gap | None:
        for gap in self._gaps.get(session, ()):
            if gap.unit == span.unit and gap.start <= span.offset and span.offset + span.nbytes <= gap.stop:
                return gap
        return None

    def _carve(self, session: bytes, span: Span) -> bool:
        gap = self._find(session, span)
        if gap is None:
            return False
        stop = span.offset + span.nbytes
        if gap.start == span.offset and stop < gap.stop:  # a reserve is used from its beginning
            gap.start = stop
            return True
        rest = [_Gap(gap.unit, gap.start, span.offset), _Gap(gap.unit, stop, gap.stop)]
        others = [other for other in self._gaps[session] if other is not gap]
        self._keep(session, [*others, *(part for part in rest if part.stop > part.start)])
        return True

    def _keep(self, session: bytes, gaps: list[_Gap]) -> None:
        if gaps:
            self._gaps[session] = gaps
        else:
            self._gaps.pop(session, None)
