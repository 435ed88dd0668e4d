"""Optional methods of sources and sinks, each with the capability that declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError
from rl_protocol.ports import Memory, WeightCapabilities


class AdapterReceiver(Protocol):
    """`adapters`: a sink that loads LoRA adapters separately from the base weights."""

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Copy a verified LoRA adapter in place of the previous one and make it active. Raises like
        `load_weights`."""
        ...


class AdoptingReceiver(Protocol):
    """`adopts`: a sink that can compute with the received weights in place instead of copying
    them."""

    def adopt_weights(self, weights: Iterable[WeightTensor], version: int, watch: Callable[[], None]) -> None:
        """Like `load_weights`, but use the tensors in place. They are read-only.

        Args:
            weights: all tensors, verified.
            version: their version.
            watch: raises WeightSyncError once the sender may have overwritten the tensors. It MUST
                be called after each use, before returning anything computed with them, and MUST
                be referenced as long as they are used.
        """
        ...


class PausableReceiver(Protocol):
    """`pauses`: a sink that can abort running requests."""

    async def pause(self) -> None:
        """Abort running requests and admit none."""
        ...

    async def resume(self) -> None:
        """Admit requests again."""
        ...


class SleepingReceiver(Protocol):
    """`sleeps`: a sink that can free memory."""

    async def sleep(self, level: Literal[1, 2]) -> int | None:
        """Abort running requests and free memory; level 2 only if it declares `drops_weights`.

        Returns:
            Bytes freed; None: unknown.
        """
        ...

    async def wake(self, part: Memory | None = None) -> None:
        """Restore one part of the memory, or all of it; no effect on a part that is awake."""
        ...


_METHODS = {
    "direct": ("layout", "write_weights"),
    "adapters": ("load_adapter",),
    "adopts": ("adopt_weights",),
    "pauses": ("pause", "resume"),
    "sleeps": ("sleep", "wake"),
}


def check_methods(end: object) -> None:
    """Check that a source or sink declares its capabilities, and has the methods of each.

    Raises:
        ConfigError: it does not; names what is missing.
    """
    kind = type(end).__name__
    declared = getattr(end, "capabilities", None)
    if not isinstance(declared, WeightCapabilities):
        raise ConfigError(f"{kind}.capabilities must be a WeightCapabilities; got {declared!r}.")
    for capability, methods in _METHODS.items():
        for method in methods if getattr(declared, capability) else ():
            if not hasattr(end, method):
                raise ConfigError(
                    f"{kind} declares {capability} but has no method {method!r}. Implement it, or do not declare it in its capabilities."
                )
