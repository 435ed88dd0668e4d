"""TransferQueueClient and AsyncTransferQueueClient: the low-level API of 0.1.11, by number of the row.

All calls of a process run on one loop, that of the portal; the async twins may be awaited on any loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rl_protocol.errors import ConfigError
from rl_transferqueue.blocking import Portal, portal
from rl_transferqueue.client import connect
from rl_transferqueue.compat import checkpoint
from rl_transferqueue.compat.core import Core
from rl_transferqueue.compat.fetching import Settings
from rl_transferqueue.descriptor import PlaneDescriptor

P = ParamSpec("P")
T = TypeVar("T")


class AsyncTransferQueueClient:
    """A client whose methods are coroutines: `async_x` for each `x` of TransferQueueClient, with the same arguments and results.

    Args:
        client_id: a name for messages.
        controller_info: the plane: a PlaneDescriptor, or its JSON (`conf.controller.zmq_info` of what `init` returns).
        zmq_io_threads, zmq_max_sockets: as in 0.1.11; a client here has one thread and one socket per process of the plane.
        settings: how to fetch; default: the sequential sampler.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: PlaneDescriptor | str,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        del zmq_io_threads, zmq_max_sockets
        self.client_id = client_id
        descriptor = PlaneDescriptor.from_json(controller_info) if isinstance(controller_info, str) else controller_info
        self.descriptor = descriptor
        self._portal = portal()
        self._core = Core(self._portal.run(connect(descriptor)), settings or Settings())
        core = self._core
        self.async_get_meta = self.hopping(core.get_meta)
        self.async_set_custom_meta = self.hopping(core.set_custom_meta)
        self.async_put = self.hopping(core.put)
        self.async_get_data = self.hopping(core.get_data)
        self.async_clear_partition = self.hopping(core.clear_partition)
        self.async_clear_samples = self.hopping(core.clear_samples)
        self.async_get_consumption_status = self.hopping(core.get_consumption_status)
        self.async_get_production_status = self.hopping(core.get_production_status)
        self.async_check_consumption_status = self.hopping(core.check_consumption_status)
        self.async_check_production_status = self.hopping(core.check_production_status)
        self.async_reset_consumption = self.hopping(core.reset_consumption)
        self.async_get_partition_list = self.hopping(core.list_partitions)
        self.async_kv_retrieve_meta = self.hopping(core.kv_retrieve_meta)
        self.async_kv_retrieve_keys = self.hopping(core.kv_retrieve_keys)
        self.async_kv_list = self.hopping(core.kv_list)
        self.async_save_controller_checkpoint = self.hopping(self._save_controller)
        self.async_load_controller_checkpoint = self.hopping(self._load_controller)
        self.async_save_storage_checkpoint = self.hopping(self._save_storage)
        self.async_load_storage_checkpoint = self.hopping(self._load_storage)

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

    async def _save_controller(self, path: str) -> None:
        await checkpoint.save_rows(self._core, Path(path))

    async def _load_controller(self, path: str) -> None:
        await checkpoint.load_rows(self._core, Path(path))

    async def _save_storage(self, checkpoint_dir: str) -> None:
        await checkpoint.save_columns(self._core, Path(checkpoint_dir))

    async def _load_storage(self, checkpoint_dir: str) -> None:
        await checkpoint.load_columns(self._core, Path(checkpoint_dir))


class TransferQueueClient(AsyncTransferQueueClient):
    """A client with blocking methods besides the async ones; see `rl_transferqueue.compat.core.Core` for what each does."""

    def __init__(
        self,
        client_id: str,
        controller_info: PlaneDescriptor | str,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(client_id, controller_info, zmq_io_threads, zmq_max_sockets, settings=settings)
        core, blocking = self._core, self._portal.blocking
        self.get_meta = blocking(core.get_meta)
        self.set_custom_meta = blocking(core.set_custom_meta)
        self.put = blocking(core.put)
        self.get_data = blocking(core.get_data)
        self.clear_partition = blocking(core.clear_partition)
        self.clear_samples = blocking(core.clear_samples)
        self.get_consumption_status = blocking(core.get_consumption_status)
        self.get_production_status = blocking(core.get_production_status)
        self.check_consumption_status = blocking(core.check_consumption_status)
        self.check_production_status = blocking(core.check_production_status)
        self.reset_consumption = blocking(core.reset_consumption)
        self.get_partition_list = blocking(core.list_partitions)
        self.kv_retrieve_meta = blocking(core.kv_retrieve_meta)
        self.kv_retrieve_keys = blocking(core.kv_retrieve_keys)
        self.kv_list = blocking(core.kv_list)
        self.save_controller_checkpoint = blocking(self._save_controller)
        self.load_controller_checkpoint = blocking(self._load_controller)
        self.save_storage_checkpoint = blocking(self._save_storage)
        self.load_storage_checkpoint = blocking(self._load_storage)
