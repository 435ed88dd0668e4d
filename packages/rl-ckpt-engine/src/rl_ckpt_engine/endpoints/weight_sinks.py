"""Optional interfaces of sinks: adapters, weights in shared memory, pause, sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from rl_protocol.batch.weight_tensor import WeightTensor

Memory: TypeAlias = Literal["weights", "kv_cache"]
"""The parts of device memory that a sleeping replica frees, in the order of restoring them."""


@runtime_checkable
class AdapterReceiver(Protocol):
    """A sink that loads LoRA adapters separately from the base weights."""

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Copy a verified LoRA adapter in place of the previous one and make it active. Raises like
        `load_weights`."""
        ...


@runtime_checkable
class AdoptingReceiver(Protocol):
    """A sink that can compute with weights in shared memory instead of copying them."""

    def adopt_weights(self, weights: Iterable[WeightTensor], version: int, watch: Callable[[], None]) -> None:
        """Like `load_weights`, but use the tensors in place. They are read-only.

        Args:
            weights: all tensors, verified.
            version: their version.
            watch: raises WeightSyncError once the sender may have overwritten the tensors. It MUST
                be called after each use, before returning anything computed with them.
        """
        ...


@runtime_checkable
class PausableReceiver(Protocol):
    """A sink that can abort running requests."""

    async def pause(self) -> None:
        """Abort running requests and admit none."""
        ...

    async def resume(self) -> None:
        """Admit requests again."""
        ...


@runtime_checkable
class SleepingReceiver(Protocol):
    """A sink that can free device memory."""

    async def sleep(self, level: Literal[1, 2]) -> None: ...

    async def wake(self, part: Memory | None = None) -> None: ...
