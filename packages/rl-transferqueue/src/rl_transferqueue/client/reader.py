"""The get path of a client: locate rows, or find them in the cache, and read their columns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.errors import PlaneLostError
from rl_transferqueue.client.copied_columns import CopiedColumns
from rl_transferqueue.client.deadline import SERVER_GRACE_S, seconds_until
from rl_transferqueue.client.leases import Leases
from rl_transferqueue.client.location_cache import Location, LocationCache, RowQuery
from rl_transferqueue.client.memory_interface import UNIT_LOSS_POLL_S, PlaneMemory
from rl_transferqueue.client.retries.controller_replaced import ControllerReplaced
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.wire.messages import Locate, Located


class Reader:
    """Reads columns for one client."""

    def __init__(self, controller: ControlClient, memory: PlaneMemory, leases: Leases, copies: CopiedColumns) -> None:
        self._controller = controller
        self._memory = memory
        self._leases = leases
        self._copies = copies
        self._cache: LocationCache | None = None
        self.bytes_read = 0
        self._forgotten = 0
        """Calls of `forget` and `forget_blocks`."""

    def use_cache(self, cache: LocationCache) -> None:
        """Answer repeated gets from `cache`, without a message to the controller."""
        self._cache = cache

    def use_memory(self, memory: PlaneMemory) -> None:
        """Read from this memory from here on."""
        self._memory = memory

    async def get(self, query: RowQuery, deadline: float) -> BatchData:
        """The columns of rows, located again if a unit ends meanwhile.

        Raises:
            MissingDataError, DataLostError: the controller's answer.
            CapacityTimeout: rows of the journal found no memory until the deadline.
            PlaneTimeout, PlaneLostError: the deadline passed; the plane has ended.
        """
        _, keys, fields, _ = query
        place = self._cache.find(query) if self._cache is not None else None
        self._controller.check()
        while True:
            era = self._controller.era
            if place is None:
                try:
                    place = await self._locate(query, deadline)
                except ControllerReplaced:
                    continue
            if era != self._controller.era:
                place = None
                continue
            if not fields:
                return BatchData({}, len(keys))
            try:
                batch = await self._read(place, fields, deadline)
            except PlaneLostError:  # a unit has ended: ask the controller where the rows are now
                self._controller.check()
                if not seconds_until(deadline):
                    raise
                await asyncio.sleep(UNIT_LOSS_POLL_S)
                place = None
            else:
                self.bytes_read += batch.nbytes
                return batch

    def forget(self, partition: str | None = None) -> None:
        """Drop copies and cached locations, of a partition or all, and end the leases that only
        they held."""
        self._forgotten += 1
        self._copies.clear()
        if self._cache is not None:
            if partition is None:
                self._cache.clear()
            else:
                self._cache.forget_partition(partition)
        self._leases.flush()

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Drop copies and cached locations in these blocks, and end the leases that only they
        held."""
        self._forgotten += 1
        blocks = tuple(blocks)
        self._copies.forget_blocks(blocks)
        if self._cache is not None:
            self._cache.forget_blocks(blocks)
        self._leases.flush()

    async def _read(self, place: Location, fields: tuple[str, ...], deadline: float) -> BatchData:
        """The columns: copies of gets before, and the others from the plane's memory."""
        kept = self._copies.find(place, fields)
        located, era = place.located, self._controller.era
        if kept:
            wanted = [(name, number) for name, number in zip(fields, located.place_of, strict=True) if name not in kept]
            if not wanted:
                return BatchData(kept)
            located = msgspec.structs.replace(located, place_of=tuple(number for _, number in wanted))
            place = Location(located, place.anchor)
        names = tuple(name for name in fields if name not in kept)
        batch = await self._memory.read(place.groups(names), names, place.anchor, seconds_until(deadline))
        if era == self._controller.era:
            self._copies.keep(place, batch)
        if not kept:
            return batch
        return BatchData({name: kept[name] if name in kept else batch[name] for name in fields})

    async def _locate(self, query: RowQuery, deadline: float) -> Location:
        lease, anchor = self._leases.new()
        partition, keys, fields, generations = query
        seconds, era, forgotten = seconds_until(deadline), self._controller.era, self._forgotten
        request = Locate(lease, partition, keys, fields, seconds, np.array(generations, "<i8").tobytes())
        place = Location(await self._controller.call(request, Located, seconds + SERVER_GRACE_S), anchor)
        # the controller may want what it has just located back: see Revoked
        if fields and self._cache is not None and (era, forgotten) == (self._controller.era, self._forgotten):
            self._cache.keep(query, place)
        return place
