"""The contract of a checkpoint engine: how one process hands a version of the weights to others.

Lifecycle, names as in verl's checkpoint engines; one object plays one role, sender or receiver:

    both      prepare -> (build_topology, wherever all metadata meet) -> init_process_group
    sender    send_weights -> finalize | abort, for each version
    receiver  receive_weights -> confirm -> (the weights are loaded) -> confirm, for each version
    both      close

Memory taken for one sync is kept for the next. A sender keeps the bytes of the version last finalized until the one after has been
finalized, so that a late joiner can still receive it. Views that a receiver got of the sender's memory (zero_copy) are good for the same
time, and `confirm` tells whether that time has passed; other tensors are the receiver's own and good until it receives again.
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
from rl_ckpt_engine.manifest import Manifest, WeightKind
from rl_protocol.dtypes import storage_dtype
from rl_protocol.weights import WeightTensor

ENGINE_API_VERSION = 1
"""Version of the contract in this module; an engine declares the one it was written against."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do.

    Attributes:
        same_host_only: sender and receivers must run on one host.
        zero_copy: receivers get views of memory the sender owns, not copies.
        elastic: receivers come and go without the others noticing; no group of fixed size is formed.
        devices: where the weights may lie while they are moved.
        durable: a version that was published outlives its sender.
    """

    same_host_only: bool
    zero_copy: bool
    elastic: bool
    devices: tuple[str, ...]
    durable: bool = False


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each member needs for `init_process_group`, in the engine's own encoding."""

    sender: bytes
    receivers: tuple[bytes, ...]
    """In the order of the metadata given to `build_topology`."""


class CheckpointEngine(ABC):
    """Moves named tensors from one sender to receivers. All errors are WeightSyncError and name phase and peer.

    Coroutines give way to the event loop at least every 16 MiB and check their deadline there. One coroutine of an object runs at a time.
    """

    API_VERSION: ClassVar[int]
    """Every engine class states `API_VERSION = 1` in its own body; the registry compares it with ENGINE_API_VERSION."""
    name: ClassVar[str]
    """Short name, as written into manifests."""
    capabilities: ClassVar[Capabilities]
    verify_seconds: float = 0.0
    """What the last receive_weights spent on digests; 0.0 from an engine that does not tell."""

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        """An engine with these settings; the plain one has none of its own.

        Raises:
            ConfigError: a setting that this engine needs is missing.
        """
        del config
        return cls()

    @abstractmethod
    def prepare(self) -> bytes:
        """This member's metadata for `build_topology`; calling it again returns the same."""

    @classmethod
    @abstractmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """Pure: what each member needs to know of the others.

        Raises:
            WeightSyncError: these members can't work together; says which and why.
        """

    @abstractmethod
    def init_process_group(self, member: bytes) -> None:
        """Join with this member's part of the topology; calling it again replaces what was known.

        Raises:
            WeightSyncError: `member` is not this engine's.
        """

    @abstractmethod
    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Publish `version`; `kind` goes into the manifest. `weights` is consumed once, tensor by tensor, in the calling thread; it must
        yield at least one.

        Returns when the bytes have been read from `weights` for good (no background work is left) unless the engine is zero_copy within
        the process, and receivers may begin. The version stays published until `finalize` of a later one, or `abort`.

        Raises:
            WeightSyncError: the former version was neither finalized nor aborted, the version does not grow, the deadline passed, or the
                memory could not be had. Nothing is published then, and the version finalized last is still there.
        """

    @abstractmethod
    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """Get and verify every tensor of the manifest, in its order.

        Raises:
            WeightSyncError: the sender is gone, the version was overwritten, a digest does not fit, or the deadline passed.
        """

    @abstractmethod
    def confirm(self, manifest: Manifest) -> None:
        """Make sure that what `receive_weights` returned for this manifest is still what was verified.

        The sender must not have given it up. An engine whose tensors can change after they were verified compares them with the digests.

        Raises:
            WeightSyncError: it is not; what was read from the tensors after the last successful confirm may be of two versions.
        """

    @abstractmethod
    def finalize(self, version: int) -> None:
        """Sender: no receiver needs any version before `version` any more, their memory may be used again. May be repeated.

        Raises:
            WeightSyncError: `version` is not the one sent last.
        """

    @abstractmethod
    def abort(self) -> None:
        """Sender: take back the version being sent, or sent and not finalized; without one, nothing happens."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory; safe to call twice. Views handed out stay readable until their last user drops them."""


class CheckpointEngineWithCache(CheckpointEngine):
    """An engine whose receivers can hand on what they received, so that late joiners need neither the trainer nor its pause."""

    @abstractmethod
    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        """What was received last, whole and verified; nothing is copied.

        Raises:
            WeightSyncError: nothing was received, or the sender has given it up.
        """

    @abstractmethod
    async def republish(self, *, timeout_s: float) -> Manifest:
        """Serve what was received last; the manifest names this process as sender, with the same version, tensors and digests.

        Raises:
            WeightSyncError: see `get_weights`; or the deadline passed.
        """


class TensorSpec(NamedTuple):
    """What a tensor looks like, without its bytes."""

    name: str
    dtype: str
    """Element type, see rl_protocol.dtypes."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return storage_dtype(self.dtype).itemsize * math.prod(self.shape)


class DirectEngine(CheckpointEngine):
    """An engine whose source may write the tensors of the next version where they are sent from, so that sending copies nothing."""

    @abstractmethod
    def room(self, layout: Sequence[TensorSpec]) -> list[npt.NDArray[np.uint8]]:
        """Writable memory, uint8 [nbytes], for each tensor of the next version; all of them are then given to `send_weights`, in this order.

        The version committed last stays readable meanwhile. Once sent, the tensors must not be written again: ask anew for each version.

        Raises:
            WeightSyncError: the last version was neither finalized nor aborted, or the memory could not be had.
        """


class SharingEngine(CheckpointEngine):
    """An engine whose receivers may compute with the weights where they lie, so that loading copies nothing."""

    @abstractmethod
    def watch(self, manifest: Manifest) -> Callable[[], None]:
        """A `confirm` for the version received last that goes on working when later ones are received. It keeps nothing from being given up: it
        tells, and whoever computed with the tensors asks it before the result is handed out.

        Raises:
            WeightSyncError: see `confirm`, now and when what is returned is called.
        """


class GroupEngine(CheckpointEngine):
    """An engine whose members move the bytes together; its capabilities are not elastic.

        both      prepare -> (build_topology) -> init_process_group -> join, all members at once
        sender    send_weights -> serve, while all receivers are in receive_weights -> finalize | abort, for each version

    A group in which anything failed is left by whoever notices, so that the others notice, too; a new one takes its place. `prepare`
    returns new metadata once they were used by init_process_group.
    """

    @abstractmethod
    async def join(self, *, timeout_s: float) -> None:
        """Form the group given to init_process_group; returns when all members are there.

        Raises:
            WeightSyncError: somebody did not come.
        """

    @abstractmethod
    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        """Sender: take part in moving a published version.

        Raises:
            WeightSyncError: the version is not published, a member failed, or the deadline passed.
        """

    @abstractmethod
    def leave(self) -> None:
        """Give the group up, so that the others notice; without one, nothing happens."""

    @abstractmethod
    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Sender: publish the version committed last once more, in another form; it can be served until a later one is finalized.

        Raises:
            WeightSyncError: the deadline passed, or the memory could not be had.
        """
