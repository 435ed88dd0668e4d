"""TransferQueueClient and AsyncTransferQueueClient: the low-level API of 0.1.11, by number of the row.

All calls of a process run on one loop, that of the portal; the async twins may be awaited on any loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rl_protocol.errors import ConfigError
from rl_transferqueue.blocking import Portal, portal
from rl_transferqueue.client import connect
from rl_transferqueue.compat import checkpoint
from rl_transferqueue.compat.core import Core
from rl_transferqueue.compat.fetching import Settings
from rl_transferqueue.descriptor import PlaneDescriptor

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Core, P], Coroutine[Any, Any, T]]


def _hopping(method: Method[P, T]) -> Callable[Concatenate[AsyncTransferQueueClient, P], Coroutine[Any, Any, T]]:
    """A method that runs an operation of the core on the portal's loop; it may be awaited on any loop."""

    @functools.wraps(method)
    async def call(self: AsyncTransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.hopping(method)(self.core, *args, **kwargs)

    return call


def _blocking(method: Method[P, T]) -> Callable[Concatenate[TransferQueueClient, P], T]:
    """A method that waits for an operation of the core."""

    @functools.wraps(method)
    def call(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.portal.run(method(self.core, *args, **kwargs))

    return call


async def _save_controller(core: Core, path: str) -> None:
    """Write rows, tags and consumption of all partitions to a file."""
    await checkpoint.save_rows(core, Path(path))


async def _load_controller(core: Core, path: str) -> None:
    """Make the rows of such a file, in place of those the plane holds."""
    await checkpoint.load_rows(core, Path(path))


async def _save_storage(core: Core, checkpoint_dir: str) -> None:
    """Write the columns of all partitions to files of a folder."""
    await checkpoint.save_columns(core, Path(checkpoint_dir))


async def _load_storage(core: Core, checkpoint_dir: str) -> None:
    """Put the columns of such a folder."""
    await checkpoint.load_columns(core, Path(checkpoint_dir))


class AsyncTransferQueueClient:
    """A client whose methods are coroutines: `async_x` for each `x` of TransferQueueClient, with the same arguments and results.

    Args:
        client_id: a name for messages.
        controller_info: the plane: a PlaneDescriptor, or its JSON (`conf.controller.zmq_info` of what `init` returns).
        zmq_io_threads, zmq_max_sockets: as in 0.1.11; a client here has one thread and one socket per process of the plane.
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
        self._core = Core(self._portal.run(connect(descriptor, timeout_s=timeout_s)), settings or Settings())

    async_get_meta = _hopping(Core.get_meta)
    async_set_custom_meta = _hopping(Core.set_custom_meta)
    async_put = _hopping(Core.put)
    async_get_data = _hopping(Core.get_data)
    async_clear_partition = _hopping(Core.clear_partition)
    async_clear_samples = _hopping(Core.clear_samples)
    async_get_consumption_status = _hopping(Core.get_consumption_status)
    async_get_production_status = _hopping(Core.get_production_status)
    async_check_consumption_status = _hopping(Core.check_consumption_status)
    async_check_production_status = _hopping(Core.check_production_status)
    async_reset_consumption = _hopping(Core.reset_consumption)
    async_get_partition_list = _hopping(Core.list_partitions)
    async_kv_retrieve_meta = _hopping(Core.kv_retrieve_meta)
    async_kv_retrieve_keys = _hopping(Core.kv_retrieve_keys)
    async_kv_list = _hopping(Core.kv_list)
    async_save_controller_checkpoint = _hopping(_save_controller)
    async_load_controller_checkpoint = _hopping(_load_controller)
    async_save_storage_checkpoint = _hopping(_save_storage)
    async_load_storage_checkpoint = _hopping(_load_storage)

    @property
    def core(self) -> Core:
        """The operations themselves; they run on the portal's loop."""
        return self._core

    @property
    def portal(self) -> Portal:
        """The thread all calls run in."""
        return self._portal

    def hopping(self, method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """The same coroutine function, to be awaited on any loop."""

        @functools.wraps(method)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return await asyncio.wrap_future(self._portal.submit(method(*args, **kwargs)))

        return call

    def initialize_storage_manager(self, manager_type: str, config: object = None) -> None:
        """Nothing to do: the descriptor names the storage units.

        Raises:
            ConfigError: a storage that is not SimpleStorage.
        """
        del config
        if manager_type not in ("SimpleStorage", "AsyncSimpleStorageManager"):
            raise ConfigError(f"The compatible client knows the storage SimpleStorage; got {manager_type!r}.")

    def close(self) -> None:
        """Release what this client holds; safe to call twice. The plane lives on."""
        self._portal.run(self._core.plane.close())


class TransferQueueClient(AsyncTransferQueueClient):
    """A client with blocking methods besides the async ones; see `rl_transferqueue.compat.core.Core` for what each does."""

    get_meta = _blocking(Core.get_meta)
    set_custom_meta = _blocking(Core.set_custom_meta)
    put = _blocking(Core.put)
    get_data = _blocking(Core.get_data)
    clear_partition = _blocking(Core.clear_partition)
    clear_samples = _blocking(Core.clear_samples)
    get_consumption_status = _blocking(Core.get_consumption_status)
    get_production_status = _blocking(Core.get_production_status)
    check_consumption_status = _blocking(Core.check_consumption_status)
    check_production_status = _blocking(Core.check_production_status)
    reset_consumption = _blocking(Core.reset_consumption)
    get_partition_list = _blocking(Core.list_partitions)
    kv_retrieve_meta = _blocking(Core.kv_retrieve_meta)
    kv_retrieve_keys = _blocking(Core.kv_retrieve_keys)
    kv_list = _blocking(Core.kv_list)
    save_controller_checkpoint = _blocking(_save_controller)
    load_controller_checkpoint = _blocking(_load_controller)
    save_storage_checkpoint = _blocking(_save_storage)
    load_storage_checkpoint = _blocking(_load_storage)
