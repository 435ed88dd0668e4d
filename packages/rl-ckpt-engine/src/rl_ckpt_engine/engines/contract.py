"""The interface of checkpoint engines, which move weights from a sender to receivers.

Lifecycle, with the method names of verl's checkpoint engines; an object is either sender or
receiver:

    both      prepare -> (build_topology, once all metadata are known) -> init_process_group
    sender    send_weights -> finalize | abort, for each version
    receiver  (prefetch) -> receive_weights -> confirm -> (load the weights) -> confirm, for each
              version
    both      close

Members of an engine that is not elastic move the bytes in a process group:

    both      prepare -> (build_topology) -> init_process_group -> join, all members concurrently
    sender    send_weights -> serve, while all receivers are in receive_weights -> finalize | abort

A member that notices a failure leaves the group, which makes the others fail, too; then a new group
is formed. `prepare` returns new metadata after `init_process_group` has used the old ones.

Memory is reused from sync to sync. A sender keeps the version finalized last until the next one is
finalized, so late joiners can receive it. Views of the sender's memory (zero_copy) are valid for
the same time; `confirm` tells whether it has passed. Other received tensors belong to the receiver
and are valid until it receives again, or as long as their `watch` is referenced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.payload.manifest import Manifest, WeightKind
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError

ENGINE_API_VERSION = 1
"""Version of this interface; an engine declares the version it implements."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of an engine.

    Attributes:
        same_host_only: sender and receivers must run on one host.
        same_process_only: and in one process.
        zero_copy: receivers get views of the sender's memory, not copies.
        elastic: receivers join and leave independently. If not, the members move the bytes in a
            process group: `join`, `serve`, `leave`, `offer`.
        devices: device types through which the weights may be moved.
        durable: a published version outlives its sender.
        caches: sender or receivers serve late joiners with their version: `get_weights`,
            `republish`.
        direct: a source can write the next version into the engine's memory: `room`.
        shares: receivers may compute with the received tensors in place: `watch`.
        prefetches: receivers receive while the sender is in `send_weights`: `prefetch`.
        relays: a receiver serves the version it received to others on its host: `relay`.
    """

    same_host_only: bool
    zero_copy: bool
    elastic: bool
    devices: tuple[str, ...]
    same_process_only: bool = False
    durable: bool = False
    caches: bool = False
    direct: bool = False
    shares: bool = False
    prefetches: bool = False
    relays: bool = False


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each member needs for `init_process_group`, in the engine's encoding."""

    sender: bytes
    receivers: tuple[bytes, ...]
    """In the order of the metadata given to `build_topology`."""


class TensorSpec(NamedTuple):
    """Name, element type and shape of a tensor."""

    name: str
    dtype: str
    """Element type, see rl_protocol.batch.dtypes."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return storage_dtype(self.dtype).itemsize * math.prod(self.shape)


class CheckpointEngine(ABC):
    """Moves named tensors from one sender to receivers.

    All errors are WeightSyncError and name phase and peer.
    Coroutines yield to the event loop and check their deadline at least every 16 MiB. Only one
    coroutine of an object runs at a time. An engine implements the optional methods that belong to
    the capabilities it declares; the others refuse.
    """

    API_VERSION: ClassVar[int]
    """Every engine class sets `API_VERSION = 1` in its body; the registry compares it with
    ENGINE_API_VERSION."""
    name: ClassVar[str]
    """Short name, used in manifests."""
    capabilities: ClassVar[Capabilities]
    verify_seconds: float = 0.0
    """Seconds that the last `receive_weights` spent on digests; 0.0 if the engine does not measure
    it."""
    prefetched_nbytes: int = 0
    """Bytes that the last `receive_weights` had from `prefetch`."""
    relayed: bool = False
    """Whether the last `receive_weights` copied the version from another receiver of the host."""

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        """Create an engine with these settings.

        Raises:
            ConfigError: a required setting is missing or invalid.
        """
        del config
        return cls()

    @abstractmethod
    def prepare(self) -> bytes:
        """This member's metadata for `build_topology`; repeated calls return the same bytes."""

    @classmethod
    @abstractmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """Compute what each member needs to know about the others; has no side effects.

        Raises:
            WeightSyncError: these members can't work together; says which and why.
        """

    @abstractmethod
    def init_process_group(self, member: bytes) -> None:
        """Set this member's part of the topology; a later call replaces it.

        Raises:
            WeightSyncError: `member` is not from this engine.
        """

    @abstractmethod
    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Publish `version`; receivers may receive it when this returns.

        All bytes have been read from `weights` by then, without background work (except for engines
        that share the tensors within a process). The version stays published until a later one is
        finalized, or until `abort`.

        Args:
            weights: at least one tensor; iterated once, in the calling thread.
            version: the version.
            timeout_s: deadline.
            kind: copied into the manifest.

        Raises:
            WeightSyncError: the previous version was neither finalized nor aborted, the version
                does not increase, the deadline passed, or there is not enough memory. Nothing is
                published, and the version finalized last stays available.
        """

    def send_metrics(self) -> dict[str, float]:
        """Measurements of the last `send_weights`, by metric name; an engine may have none."""
        return {}

    @abstractmethod
    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """Receive and verify every tensor of the manifest, in its order.

        Raises:
            WeightSyncError: the sender is gone, the version was overwritten, a digest differs, or
                the deadline passed.
        """

    @abstractmethod
    def confirm(self, manifest: Manifest) -> None:
        """Check that the tensors returned by `receive_weights` are still the verified ones.

        The sender must not have dropped the version. An engine whose tensors can change after
        verification compares them with the digests again.

        Raises:
            WeightSyncError: they are not. Data read since the last successful `confirm` may mix two
                versions.
        """

    @abstractmethod
    def finalize(self, version: int) -> None:
        """Sender: commit `version`; the memory of older versions may be reused. Idempotent.

        Raises:
            WeightSyncError: `version` is not the one sent last.
        """

    @abstractmethod
    def abort(self) -> None:
        """Sender: withdraw the version being sent, or sent and not finalized; no effect without
        one."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory; safe to call twice. Views stay readable until their last reference is
        dropped."""

    # ---- with `caches`

    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        """The version received last, verified and without a copy.

        Raises:
            WeightSyncError: nothing was received, or the sender has dropped the version.
        """
        raise self._lacks("does not cache weights for late joiners")

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Serve the version received last, without involving the trainer.

        Returns:
            A manifest with the same version, tensors and digests that names this process as sender.

        Raises:
            WeightSyncError: see `get_weights`; or the deadline passed.
        """
        del timeout_s
        raise self._lacks("does not cache weights for late joiners")

    # ---- with `relays`

    async def relay(self, *, timeout_s: float) -> Manifest:
        """Serve the version received last to the other receivers of this host, until the next call
        or `close`.

        Returns:
            The manifest that was received, with another placement. A receiver that can't read the
            version here receives it from the sender.

        Raises:
            WeightSyncError: nothing was received, there is not enough memory, or the deadline
                passed.
        """
        del timeout_s
        raise self._lacks("does not relay weights")

    # ---- with `direct`

    def room(self, layout: Sequence[TensorSpec]) -> list[npt.NDArray[np.uint8]]:
        """Writable memory, uint8 [nbytes], for each tensor of the next version.

        Pass all of them to `send_weights`, in this order, and do not write to them afterwards; call
        `room` again for each version. The version committed last stays readable meanwhile.

        Raises:
            WeightSyncError: the last version was neither finalized nor aborted, or there is not
                enough memory.
        """
        del layout
        raise self._lacks("has no memory for sources to write to")

    # ---- with `shares`

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        """A function that confirms the version received last, even after later ones are received.

        It does not keep the sender's memory alive. The receiver's own memory is not used for
        another version while the function is referenced. Call it after computing with the tensors,
        before using the result.

        Raises:
            WeightSyncError: see `confirm`; raised by this method and by the returned function.
        """
        del manifest
        raise self._lacks("has no memory for sinks to compute in")

    # ---- with `prefetches`

    async def prefetch(self, version: int, *, timeout_s: float) -> None:
        """Receiver: start to receive `version` while the sender is in `send_weights`.

        Returns at once; a task of the running event loop receives what the sender has written. The
        next `receive_weights` ends it and receives what is missing. Bytes that turn out not to be
        those of its manifest are received again. Has no effect before the first `receive_weights`.
        The version received last can't be served (`get_weights`) any more.

        Args:
            version: the version that the sender will send.
            timeout_s: the task ends by then.
        """
        del version, timeout_s
        raise self._lacks("receives nothing before its manifest")

    # ---- if not `elastic`

    async def join(self, *, timeout_s: float) -> None:
        """Form the group given to `init_process_group`; returns when all members have joined.

        Raises:
            WeightSyncError: a member did not join.
        """
        del timeout_s
        raise self._lacks("forms no group")

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        """Sender: move a published version to the receivers.

        Raises:
            WeightSyncError: the version is not published, a member failed, or the deadline passed.
        """
        del manifest, timeout_s
        raise self._lacks("forms no group")

    def leave(self) -> None:
        """Leave the group, which makes the other members fail; no effect without a group."""
        raise self._lacks("forms no group")

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Sender: publish the version committed last again, possibly in another form.

        It can be served until a later version is finalized.

        Raises:
            WeightSyncError: the deadline passed, or there is not enough memory.
        """
        del weights, version, timeout_s, kind
        raise self._lacks("forms no group")

    def _lacks(self, what: str) -> WeightSyncError:
        return WeightSyncError(f"Engine {self.name!r} {what}.")


def check_capabilities(engine: type[CheckpointEngine]) -> None:
    """Check that an engine implements the methods of the capabilities it declares.

    Raises:
        ConfigError: a method is missing; names it and the capability.
    """
    declared = engine.capabilities
    needed = {
        "elastic=False": () if declared.elastic else ("join", "serve", "leave", "offer"),
        "caches": ("get_weights", "republish") if declared.caches else (),
        "direct": ("room",) if declared.direct else (),
        "shares": ("watch",) if declared.shares else (),
        "prefetches": ("prefetch",) if declared.prefetches else (),
        "relays": ("relay",) if declared.relays else (),
    }
    for capability, methods in needed.items():
        for method in methods:
            if getattr(engine, method) is getattr(CheckpointEngine, method):
                raise ConfigError(
                    f"Engine {engine.name!r} declares {capability} but has no method {method!r}. Implement it, or set "
                    "CheckpointEngineConfig.backend to shm or tcp."
                )
