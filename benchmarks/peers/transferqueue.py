"""TransferQueue 0.1.11 (PyPI): its unmodified controller and storage units as processes.

TransferQueue runs them as Ray actors; its data and metadata paths are ZeroMQ, so leaving Ray out
leaves out nothing that is measured. Used by the benchmarks with `uv run --group bench`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

_spawn = multiprocessing.get_context("spawn")


def _serve(kind: str, config: dict[str, Any], pipe: Connection) -> None:
    import transfer_queue.controller as controller
    from transfer_queue.storage import simple_storage

    logging.disable(logging.WARNING)
    actor = controller.TransferQueueController if kind == "controller" else simple_storage.SimpleStorageUnit
    plain = actor.__ray_metadata__.modified_class
    server = plain() if kind == "controller" else plain(config=config)
    pipe.send(server.zmq_server_info)
    pipe.recv()
    os.kill(os.getpid(), 9)  # its threads do not end by themselves


class PeerPlane:
    """A TransferQueue with `units` storage units; `info` is what a client needs to connect."""

    def __init__(self, units: int) -> None:
        self.name = f"TransferQueue {units} unit{'s' if units > 1 else ''}"
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        config = {"num_data_storage_units": units, "total_storage_size": None}
        for kind in ("controller", *["unit"] * units):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=_serve, args=(kind, config, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        controller, *stores = [pipe.recv() for pipe in self._pipes]
        self.info = {"controller": controller, "stores": {store.id: store for store in stores}}

    @property
    def pids(self) -> list[int]:
        """The controller's process, then the units'."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)


@contextlib.contextmanager
def peer_planes(*units: int) -> Iterator[list[PeerPlane]]:
    """One plane for each number of units."""
    with contextlib.ExitStack() as stack:
        planes = [PeerPlane(number) for number in units]
        for plane in planes:
            stack.callback(plane.close)
        yield planes


def connect_peer(info: dict[str, Any], name: str) -> Any:
    """TransferQueue's own client of that plane."""
    from transfer_queue.client import TransferQueueClient

    logging.disable(logging.WARNING)
    client = TransferQueueClient(client_id=f"{name}_{os.getpid()}_{id(info)}", controller_info=info["controller"])
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": info["stores"]})
    return client


def use_peer(client: Any) -> Any:
    """Make transfer_queue's functions (kv_put and others) use that client; return the module."""
    import transfer_queue
    from transfer_queue import interface

    interface._TQ_CLIENT = client
    return transfer_queue
