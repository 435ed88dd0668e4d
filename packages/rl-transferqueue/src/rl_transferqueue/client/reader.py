"""The get path of a client: locate rows, or find them in the cache, and read their columns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.errors import PlaneLostError
from rl_transferqueue.client.deadline import seconds_until
from rl_transferqueue.client.leases import Leases
from rl_transferqueue.client.location_cache import Location, LocationCache, RowQuery
from rl_transferqueue.client.memory_interface import UNIT_LOSS_POLL_S, PlaneMemory
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.wire.messages import Locate, Located


class Reader:
    """Reads columns for one client."""

    def __init__(self, controller: ControlClient, memory: PlaneMemory, leases: Leases) -> None:
        self._controller = controller
        self._memory = memory
        self._leases = leases
        self._cache: LocationCache | None = None
        self.bytes_read = 0

    def use_cache(self, cache: LocationCache) -> None:
        """Answer repeated gets from `cache`, without a message to the controller."""
        self._cache = cache

    async def get(self, query: RowQuery, deadline: float) -> BatchData:
        """The columns of rows, located again if a unit ends meanwhile.

        Raises:
            MissingDataError, DataLostError: the controller's answer.
            PlaneTimeout, PlaneLostError: the deadline passed; the plane has ended.
        """
        _, keys, fields, _ = query
        place = self._cache.find(query) if self._cache is not None else None
        self._controller.check()
        while True:
            if place is None:
                place = await self._locate(query, deadline)
            if not fields:
                return BatchData({}, len(keys))
            try:
                batch = await self._memory.read(place.located, fields, place.anchor, seconds_until(deadline))
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
        """Drop cached locations of a partition, or all, and end the leases that only they held."""
        if self._cache is not None:
            if partition is None:
                self._cache.clear()
            else:
                self._cache.forget_partition(partition)
        self._leases.flush()

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Drop cached locations in these blocks, and end the leases that only they held."""
        if self._cache is not None:
            self._cache.forget_blocks(blocks)
        self._leases.flush()

    async def _locate(self, query: RowQuery, deadline: float) -> Location:
        lease, anchor = self._leases.new()
        partition, keys, fields, generations = query
        request = Locate(lease, partition, keys, fields, np.array(generations, "<i8").tobytes())
        place = Location(await self._controller.call(request, Located, seconds_until(deadline)), anchor)
        if fields and self._cache is not None:
            self._cache.keep(query, place)
        return place
