"""Engine `ray`: buckets are objects in Ray's object store, which receivers copy from.

Ray transfers the objects to the nodes of the receivers. An actor of the sender lists the objects of
each version; actor and objects die with the sender. The engine trusts every process in the cluster,
which could run code anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, RayError

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.payload.block_stream import Deadline, Pacer
from rl_ckpt_engine.payload.digests import blocks
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError

_NAMESPACE = "rl-ckpt-engine"
_BOARD_S = 60.0
"""Longest duration of a call to the sender's actor; the first one starts a process."""


class RayMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    board: str
    """Random name of a sender's actor."""


class RayPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of the payload."""

    token: bytes
    """Key of the version in the sender's actor."""
    object_bytes: int
    """Object k holds the payload from byte k * object_bytes on."""


_member_decoder = msgspec.msgpack.Decoder(RayMember)
_placement_decoder = msgspec.msgpack.Decoder(RayPlacement)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class _ObjectDirectory:
    """Actor with token -> the objects of a version, in order.

    Ray restarts it, without versions, if its process ends; it ends with the sender.
    """

    def __init__(self) -> None:
        self._versions: dict[bytes, list[Any]] = {}

    def show(self, token: bytes, objects: list[Any]) -> None:
        self._versions[token] = objects

    def find(self, token: bytes) -> list[Any]:
        return self._versions.get(token, [])

    def forget(self, token: bytes) -> None:
        self._versions.pop(token, None)


class ObjectsOfVersion:
    """Sender side: the objects of one version.

    Args:
        board: an actor that runs _ObjectDirectory.
        object_bytes: size of every object except the last.
    """

    unordered = False

    def __init__(self, board: Any, object_bytes: int) -> None:
        self._board = board
        self._object_bytes = object_bytes
        self._token = b""
        self._objects: list[Any] = []
        self._bucket: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def placement(self) -> bytes:
        """Msgpack of RayPlacement."""
        return msgspec.msgpack.encode(RayPlacement(token=self._token, object_bytes=self._object_bytes))

    def begin(self, version: int) -> None:
        """Drop the previous version; objects of the next one follow."""
        del version
        self.withdraw()
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._bucket = np.zeros(self._object_bytes, np.uint8)

    def start(self, weight: WeightTensor, offset: int) -> bool:
        """Prepare nothing: offsets are in the manifest."""
        del weight, offset
        return True

    def write(self, offset: int, piece: memoryview) -> None:
        """Copy a piece into the bucket; a full bucket becomes an object."""
        while piece:
            number, at = divmod(offset, self._object_bytes)
            while number > len(self._objects):  # several, if padding spans them
                self._put(self._object_bytes)
            part = piece[: self._object_bytes - at]
            self._bucket[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
            piece, offset = piece[part.nbytes :], offset + part.nbytes

    def complete(self, manifest: Manifest) -> None:
        """Put the last object and make the version available to receivers."""
        while (left := manifest.payload_nbytes - len(self._objects) * self._object_bytes) > 0:
            self._put(min(left, self._object_bytes))
        self._bucket = np.empty(0, np.uint8)
        _call(self._board.show.remote(self._token, self._objects))

    def withdraw(self) -> None:
        """Release the objects; Ray frees them once no receiver reads them."""
        if self._objects and ray.is_initialized():
            _call(self._board.forget.remote(self._token))
        self._objects = []

    def close(self) -> None:
        """Release the objects; the engine ends the actor."""
        self._objects = []

    def _put(self, nbytes: int) -> None:
        with _named("Putting the weights into Ray's object store"):
            self._objects.append(ray.put(self._bucket[:nbytes]))


class RayEngine(PublishingEngine[ObjectsOfVersion]):
    """Sends through Ray's object store; a sender's memory is one bucket plus two versions in the
    store. It is created anywhere, and works in a process that is part of a Ray cluster; elsewhere
    its calls raise ConfigError.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "ray"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=True, devices=("cpu",), caches=True, shares=True
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._me = RayMember(board=f"weights-{secrets.token_hex(DIGEST_BYTES)}")
        self._board: Any = None

    def prepare(self) -> bytes:
        _require_cluster()
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            _member(member)

    def _new_store(self) -> ObjectsOfVersion:
        _require_cluster()
        if self._board is None:
            actor: Any = _ObjectDirectory
            self._board = actor.options(name=self._me.board, namespace=_NAMESPACE).remote()
        return ObjectsOfVersion(self._board, self._config.bucket_bytes)

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        placement = decode_struct(_placement_decoder, manifest.placement, "placement of an engine 'ray'")
        objects = await self._find(manifest, placement.token, deadline) if buckets else []
        if len(objects) != -(-manifest.payload_nbytes // placement.object_bytes) and buckets:
            raise WeightSyncError(
                f"Version {manifest.version} is no longer available: the sender withdrew it or has a later version. "
                "A new sync is needed."
            )
        reading = _ObjectReader(objects, placement.object_bytes, deadline)
        pacer = Pacer(deadline)
        for bucket in buckets:
            for start, block in blocks(bucket.memory):
                await reading.copy(bucket.start + start, block)
                await pacer.advance(block.nbytes)
            yield

    async def _find(self, manifest: Manifest, token: bytes, deadline: Deadline) -> list[Any]:
        _require_cluster()
        with _named(f"Receiving version {manifest.version}"):
            try:
                board = ray.get_actor(_member(manifest.sender).board, namespace=_NAMESPACE)
            except ValueError as error:
                raise WeightSyncError(
                    f"The sender of version {manifest.version} is gone: it died or closed. A new sync is needed."
                ) from error
            return list(await _result(board.find.remote(token), deadline))

    def close(self) -> None:
        super().close()
        board, self._board = self._board, None
        if board is not None and ray.is_initialized():
            ray.kill(board)


def _require_cluster() -> None:
    if not ray.is_initialized():
        raise ConfigError(
            "Engine 'ray' needs a Ray cluster, but this process is not part of one: call ray.init() first, or set "
            "CheckpointEngineConfig.backend to shm or tcp."
        )


class _ObjectReader:
    """Receiver side: reads the payload, one object at a time.

    Args:
        objects: references to the objects, in order.
        object_bytes: size of every object except the last.
        deadline: deadline of the receive.
    """

    def __init__(self, objects: Sequence[Any], object_bytes: int, deadline: Deadline) -> None:
        self._objects = objects
        self._object_bytes = object_bytes
        self._deadline = deadline
        self._number = -1
        self._found = memoryview(b"")

    async def copy(self, start: int, into: memoryview) -> None:
        """Fill `into` with the payload from `start` on.

        Raises:
            WeightSyncError: an object is missing or malformed, or the deadline passed.
        """
        while into:
            number, at = divmod(start, self._object_bytes)
            if number != self._number:
                self._found, self._number = await self._get(number), number
            part = into[: self._object_bytes - at]
            if self._found.nbytes < at + part.nbytes:
                raise WeightSyncError(f"Object {number} of the version ends before byte {at + part.nbytes}.")
            part[:] = self._found[at : at + part.nbytes]
            into, start = into[part.nbytes :], start + part.nbytes

    async def _get(self, number: int) -> memoryview:
        with _named("Reading the weights from Ray's object store"):
            found = await _result(self._objects[number], self._deadline)
        if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 1:
            raise WeightSyncError(f"Object {number} of the version does not contain weights.")
        return found.data


@contextlib.contextmanager
def _named(what: str) -> Generator[None]:
    try:
        yield
    except RayError as error:
        reason = str(error).splitlines()[0]
        raise WeightSyncError(
            f"{what} failed: {type(error).__name__}: {reason} Is the sender alive, and object_store_memory large enough?"
        ) from error


def _call(reference: Any) -> Any:
    with _named("A call to the sender's actor"):
        try:
            return ray.get(reference, timeout=_BOARD_S)
        except GetTimeoutError as error:
            raise WeightSyncError(f"Ray did not answer within {_BOARD_S:g} s.") from error


async def _result(reference: Any, deadline: Deadline) -> Any:
    """Await an object without blocking the event loop."""
    try:
        async with deadline.timeout():
            return await asyncio.wrap_future(reference.future())
    except TimeoutError:
        deadline.check()
        raise


def _member(metadata: bytes) -> RayMember:
    return decode_struct(_member_decoder, metadata, "metadata of an engine 'ray'")
