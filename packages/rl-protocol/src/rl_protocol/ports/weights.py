"""The weight synchronization ports: WeightSender, WeightReceiver and WeightSync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from rl_protocol.batch.weight_tensor import WeightTensor


@dataclass(frozen=True, kw_only=True)
class WeightCapabilities:
    """What a WeightSender or WeightReceiver can do beyond the methods of its port.

    The weight engine defines the optional methods, and calls only those that are declared.

    Attributes:
        direct: a sender writes its weights into given memory: `layout`, `write_weights`.
        adapters: a receiver loads LoRA adapters: `load_adapter`.
        adopts: a receiver computes with weights in shared memory: `adopt_weights`.
        pauses: a receiver aborts running requests: `pause`, `resume`.
        sleeps: a receiver frees device memory: `sleep`, `wake`.
    """

    direct: bool = False
    adapters: bool = False
    adopts: bool = False
    pauses: bool = False
    sleeps: bool = False


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
