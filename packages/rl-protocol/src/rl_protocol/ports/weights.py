"""The weight synchronization ports: WeightSender, WeightReceiver and WeightSync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rl_protocol.batch.weight_tensor import WeightTensor

Memory: TypeAlias = Literal["weights", "kv_cache"]
"""The parts of memory that a sleeping replica frees, in the order of restoring them."""


@dataclass(frozen=True, kw_only=True)
class WeightCapabilities:
    """What a WeightSender or WeightReceiver can do beyond the methods of its port.

    The weight engine defines the optional methods, and calls only those that are declared.

    Attributes:
        direct: a sender writes its weights into given memory: `layout`, `write_weights`.
        adapters: a receiver loads LoRA adapters: `load_adapter`.
        adopts: a receiver computes with received weights in place: `adopt_weights`.
        pauses: a receiver aborts running requests: `pause`, `resume`.
        sleeps: a receiver frees memory: `sleep`, `wake`.
        drops_weights: it can free the memory of its weights, too; they must be sent again.
    """

    direct: bool = False
    adapters: bool = False
    adopts: bool = False
    pauses: bool = False
    sleeps: bool = False
    drops_weights: bool = False


@runtime_checkable
class WeightSender(Protocol):
    """Source of the newest weights: a policy under training."""

    @property
    def capabilities(self) -> WeightCapabilities:
        """What it can do beyond this port."""
        ...

    def named_weights(self) -> Iterable[WeightTensor]:
        """Yield every parameter and buffer the rollout engine needs, under Hugging Face names, in a
        fixed order."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """Sink of weights: a rollout engine."""

    @property
    def capabilities(self) -> WeightCapabilities:
        """What it can do beyond this port."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the active weights."""
        ...

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Copy verified weights in and make them active as `version`.

        Raises:
            WeightSyncError: a weight is missing, unknown, or of another shape or element type; the
                old weights stay.
        """
        ...


class WeightSyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one synchronization."""

    version: int
    num_bytes: int
    seconds: float
    receivers: tuple[str, ...]
    """Names of the replicas that activated the version."""


@runtime_checkable
class WeightSync(Protocol):
    """Synchronizes the trainer's weights to every rollout replica."""

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send, verify and activate `version` on every replica.

        Raises:
            WeightSyncError: no replica could activate it; names each replica and its reason.
        """
        ...


class RolloutMemory(Protocol):
    """Frees memory of all rollout replicas while they generate nothing."""

    async def sleep(self, *, weights_follow: bool) -> int | None:
        """End what runs and free memory until `wake`.

        Args:
            weights_follow: new weights are sent between waking "weights" and waking "kv_cache". If
                not, the replicas keep their weights, and only "kv_cache" is woken.

        Returns:
            Bytes that the replicas freed; None: unknown.

        Raises:
            WeightSyncError: no replica sleeps; names each and its reason.
        """
        ...

    async def wake(self, part: Memory) -> None:
        """Restore one part of the memory.

        Raises:
            WeightSyncError: no replica woke up; names each and its reason.
        """
        ...
