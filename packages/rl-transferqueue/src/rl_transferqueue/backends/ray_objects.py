"""Blocks in Ray's object store; one actor per unit owns them, so they outlive the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayError

from rl_protocol.errors import DataPlaneError, PlaneLostError
from rl_protocol.wire import Buffer
from rl_transferqueue.backends import Share

_NAMESPACE = "rl-transferqueue"
_WAIT_S = 30.0
"""Longest a call to the actor may take."""


@ray.remote(num_cpus=0, max_restarts=0)
class _Holder:
    """Owner of the blocks of one unit."""

    def __init__(self) -> None:
        self._blocks: dict[str, Any] = {}

    def keep(self, key: str, block: np.ndarray) -> None:
        self._blocks[key] = ray.put(block)  # owned by this actor; the argument is the caller's

    def find(self, key: str) -> list[Any]:
        """The reference, wrapped so that Ray hands it over as it is; empty: there is none."""
        return [self._blocks[key]] if key in self._blocks else []

    def free(self, keys: list[str]) -> None:
        for key in keys:
            self._blocks.pop(key, None)


class RayStore:
    """Blocks as objects that one actor owns."""

    def __init__(self, holder: Any, *, hosting: bool) -> None:
        self._holder = holder
        self._hosting = hosting

    def put_block(self, key: str, parts: Sequence[Buffer]) -> None:
        """Copies twice: into the store, and into an object that the actor owns."""
        block = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        self._call(self._holder.keep.remote(key, block))

    def get_block(self, key: str, nbytes: int) -> Buffer:
        """Returns a view of the node's object store."""
        found = self._call(self._holder.find.remote(key))
        if not found:
            raise DataPlaneError(f"Ray's object store has no block {key!r}.")
        return memoryview(self._call(found[0]))[:nbytes]

    def free(self, keys: Sequence[str]) -> None:
        self._call(self._holder.free.remote(list(keys)))

    def close(self) -> None:
        """The actor ends with the process that hosts it."""
        if self._hosting:
            ray.kill(self._holder)
            ray.shutdown()

    def _call(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=_WAIT_S)
        except GetTimeoutError as error:
            raise DataPlaneError(f"Ray did not answer within {_WAIT_S:g} s: {error}.") from error
        except ObjectStoreFullError as error:
            raise DataPlaneError(
                f"Ray's object store is full: raise object_store_memory of the Ray cluster, or lower TransferQueueConfig.capacity_mb: {error}."
            ) from error
        except RayError as error:
            raise PlaneLostError(f"The owner of the blocks in Ray is gone: {type(error).__name__}: {error}.") from error


class RayBackend:
    """`backend_address` is that of a Ray cluster; empty: the one that Ray finds."""

    def host(self, share: Share) -> RayStore:
        _connect(share.address)
        options: Any = _Holder.options(name=_name(share), namespace=_NAMESPACE)  # type: ignore[attr-defined]
        holder = options.remote()
        ray.get(holder.free.remote([]), timeout=_WAIT_S)
        return RayStore(holder, hosting=True)

    def join(self, share: Share) -> RayStore:
        _connect(share.address)
        try:
            return RayStore(ray.get_actor(_name(share), namespace=_NAMESPACE), hosting=False)
        except ValueError as error:
            raise PlaneLostError(f"The owner of the blocks in Ray is gone: {error}.") from error


def _name(share: Share) -> str:
    return f"{share.plane}-{share.unit}"


def _connect(address: str) -> None:
    if not ray.is_initialized():
        ray.init(address=address or "auto", namespace=_NAMESPACE, log_to_driver=False)
