"""Helpers for tests of planes without shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rl_protocol import BatchData, dense
from rl_transferqueue import LocalPlane, PlaneDescriptor, TransferQueueConfig
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.connection_limits import DEFAULT, Limits
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.descriptor import ControllerAddress, UnitAddress

MIB = 1 << 20
SMALL = TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1, listen="127.0.0.2", shared_memory=False)
NO_KEY = PlaneKey(b"")


def rows_of(value: int, nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.full((1, nbytes), value, np.uint8))})


def call_on(plane: LocalPlane, server: ControllerAddress | UnitAddress, session: bytes) -> BulkConnection:
    return dial(server, plane.descriptor.host, "server", NO_KEY, session, 60)


OTHER_CLIENT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect

async def main():
    async with await connect(PlaneDescriptor.from_json(sys.argv[1])) as client:
        meta = await client.put("p", ["a", "b"], BatchData({"x": dense(np.arange(1 << 17).reshape(2, -1))}))
        got = (await client.get(meta.select_rows([1]))).dense("x").values
        assert got.tolist() == [list(range(1 << 16, 1 << 17))]
        await client.clear("p")
        maps = Path("/proc/self/maps").read_text()
        print("rl-transferqueue (deleted)" in maps or "/rl-memory-" in maps)

asyncio.run(main())
"""


def other_client(descriptor: PlaneDescriptor, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-W", "error", "-c", OTHER_CLIENT, descriptor.to_json()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )


@contextmanager
def running(reactor: Reactor) -> Iterator[None]:
    """Run the reactor in a thread inside the `with` block."""
    stop, stopped = os.pipe()
    reactor.watch(stop, reactor.stop)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join()
        os.close(stop)


@contextmanager
def served(key: PlaneKey, limits: Limits = DEFAULT) -> Iterator[BulkServer]:
    reactor = Reactor()
    server = BulkServer(reactor, "127.0.0.1", key, limits=limits)
    with running(reactor):
        yield server
    server.close()
