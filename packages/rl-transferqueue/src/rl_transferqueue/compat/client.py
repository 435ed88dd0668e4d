"""TransferQueueClient and AsyncTransferQueueClient of 0.1.11: the low-level API, by global index.

All calls of a process run on the portal's event loop; async methods may be awaited on any loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rl_protocol.errors import ConfigError
from rl_transferqueue.client.blocking_client import Portal, portal
from rl_transferqueue.client.client import connect
from rl_transferqueue.compat import checkpoint_files, row_status, rows_by_index, rows_by_key
from rl_transferqueue.compat.session import Session, Settings
from rl_transferqueue.wire.descriptor import PlaneDescriptor

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]


def _on_any_loop(method: Method[P, T]) -> Callable[Concatenate[AsyncTransferQueueClient, P], Coroutine[Any, Any, T]]:
    """A coroutine method that runs an operation on the portal's loop, from any loop."""

    @functools.wraps(method)
    async def call(self: AsyncTransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.on_any_loop(method)(self.session, *args, **kwargs)

    return call


def _blocking(method: Method[P, T]) -> Callable[Concatenate[TransferQueueClient, P], T]:
    """A method that blocks until an operation is done."""

    @functools.wraps(method)
    def call(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.portal.run(method(self.session, *args, **kwargs))

    return call


async def _save_controller(session: Session, path: str) -> None:
    """Write rows, tags and consumption of all partitions to a file."""
    await checkpoint_files.save_rows(session, Path(path))


async def _load_controller(session: Session, path: str) -> None:
    """Replace all rows of the plane by those of such a file."""
    await checkpoint_files.load_rows(session, Path(path))


async def _save_storage(session: Session, checkpoint_dir: str) -> None:
    """Write the columns of all partitions to files of a folder."""
    await checkpoint_files.save_columns(session, Path(checkpoint_dir))


async def _load_storage(session: Session, checkpoint_dir: str) -> None:
    """Put the columns of such a folder."""
    await checkpoint_files.load_columns(session, Path(checkpoint_dir))


class AsyncTransferQueueClient:
    """A client with coroutine methods: `async_x` is `x` of TransferQueueClient as a coroutine.

    Args:
        client_id: a name for messages.
        controller_info: a PlaneDescriptor, or its JSON (`controller.zmq_info` of the settings).
        zmq_io_threads: ignored; here a client has one thread.
        zmq_max_sockets: ignored; here a client has one socket per process of the plane.
        settings: how to fetch; default: the sequential sampler.
        timeout_s: seconds to connect within.

    Raises:
        PlaneLostError, PlaneTimeout: see `rl_transferqueue.connect`.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: PlaneDescriptor | str,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
        *,
        settings: Settings | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        del zmq_io_threads, zmq_max_sockets
        self.client_id = client_id
        descriptor = PlaneDescriptor.from_json(controller_info) if isinstance(controller_info, str) else controller_info
        self.descriptor = descriptor
        self._portal = portal()
        self._session = Session(self._portal.run(connect(descriptor, timeout_s=timeout_s)), settings or Settings())

    async_get_meta = _on_any_loop(rows_by_index.get_meta)
    async_set_custom_meta = _on_any_loop(rows_by_index.set_custom_meta)
    async_put = _on_any_loop(rows_by_index.put)
    async_get_data = _on_any_loop(rows_by_index.get_data)
    async_clear_partition = _on_any_loop(rows_by_index.clear_partition)
    async_clear_samples = _on_any_loop(rows_by_index.clear_samples)
    async_get_consumption_status = _on_any_loop(row_status.get_consumption_status)
    async_get_production_status = _on_any_loop(row_status.get_production_status)
    async_check_consumption_status = _on_any_loop(row_status.check_consumption_status)
    async_check_production_status = _on_any_loop(row_status.check_production_status)
    async_reset_consumption = _on_any_loop(row_status.reset_consumption)
    async_get_partition_list = _on_any_loop(rows_by_key.list_partitions)
    async_kv_retrieve_meta = _on_any_loop(rows_by_key.kv_retrieve_meta)
    async_kv_retrieve_keys = _on_any_loop(rows_by_key.kv_retrieve_keys)
    async_kv_list = _on_any_loop(rows_by_key.kv_list)
    async_save_controller_checkpoint = _on_any_loop(_save_controller)
    async_load_controller_checkpoint = _on_any_loop(_load_controller)
    async_save_storage_checkpoint = _on_any_loop(_save_storage)
    async_load_storage_checkpoint = _on_any_loop(_load_storage)

    @property
    def session(self) -> Session:
        """The session that operations take; they run on the portal's loop."""
        return self._session

    @property
    def portal(self) -> Portal:
        """The thread that runs all calls."""
        return self._portal

    def on_any_loop(self, method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """The coroutine function, made awaitable on any loop."""

        @functools.wraps(method)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return await asyncio.wrap_future(self._portal.submit(method(*args, **kwargs)))

        return call

    def initialize_storage_manager(self, manager_type: str, config: object = None) -> None:
        """Check the name of the storage; the descriptor already names the storage units.

        Raises:
            ConfigError: a storage other than SimpleStorage.
        """
        del config
        if manager_type not in ("SimpleStorage", "AsyncSimpleStorageManager"):
            raise ConfigError(f"manager_type must be SimpleStorage; got {manager_type!r}.")

    def close(self) -> None:
        """Close this client; safe to call twice. The plane stays up."""
        self._portal.run(self._session.plane.close())


class TransferQueueClient(AsyncTransferQueueClient):
    """A client with blocking methods besides the async ones."""

    get_meta = _blocking(rows_by_index.get_meta)
    set_custom_meta = _blocking(rows_by_index.set_custom_meta)
    put = _blocking(rows_by_index.put)
    get_data = _blocking(rows_by_index.get_data)
    clear_partition = _blocking(rows_by_index.clear_partition)
    clear_samples = _blocking(rows_by_index.clear_samples)
    get_consumption_status = _blocking(row_status.get_consumption_status)
    get_production_status = _blocking(row_status.get_production_status)
    check_consumption_status = _blocking(row_status.check_consumption_status)
    check_production_status = _blocking(row_status.check_production_status)
    reset_consumption = _blocking(row_status.reset_consumption)
    get_partition_list = _blocking(rows_by_key.list_partitions)
    kv_retrieve_meta = _blocking(rows_by_key.kv_retrieve_meta)
    kv_retrieve_keys = _blocking(rows_by_key.kv_retrieve_keys)
    kv_list = _blocking(rows_by_key.kv_list)
    save_controller_checkpoint = _blocking(_save_controller)
    load_controller_checkpoint = _blocking(_load_controller)
    save_storage_checkpoint = _blocking(_save_storage)
    load_storage_checkpoint = _blocking(_load_storage)
