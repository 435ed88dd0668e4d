"""Engine `tcp`: receivers pull the weights from a copy in the sender's memory over TCP.

    sender -> receiver   b"RLW1", nonce [32]
    receiver -> sender   nonce [32], proof [32]
    sender -> receiver   1 byte (1: accepted, 0: refused), proof [32]
    then, any number of times
    receiver -> sender   sync_id [16], u64 offset, u64 size, little-endian
    sender -> receiver   1 byte (1: the bytes follow, 0: that sync is no longer available, 2: not
    written yet), `size` bytes

* Proofs are HMAC-SHA256 over both nonces and the sender's random token. They prove the key, can't
  be replayed, and detect another process on the port of a dead sender. Without a key the empty key
  is used, which is allowed only on loopback.
* The sender MUST close a connection that has not finished the handshake within `HANDSHAKE_S`.
* After the handshake, bytes are neither encrypted nor authenticated; the manifest, which is sent
  separately, has their digests.
* Instead of a sync_id, 8 bytes 0xff and a u64 version ask for bytes of a version whose manifest the
  receiver does not have. Only these requests are answered by 2. The receiver MUST use only tensors
  whose digest is that of the manifest.
* Of several receivers on one host, one can relay the version to the others (see base.host_relay).
* A receiver requests the next bucket before it has the current one, so the sender is not idle while
  it hashes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.host_relay import HostRelay, is_relayed
from rl_ckpt_engine.engines.base.memfd import Slot
from rl_ckpt_engine.engines.base.prefetch import Prefetch
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.engines.network.listen_address import listen_address
from rl_ckpt_engine.engines.network.tcp_secret import HOW_TO_SET, load_key
from rl_ckpt_engine.engines.network.tcp_transport import TcpTransport, read_member
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)


class TcpEngine(PublishingEngine[Slot]):
    """Receivers pull buckets over TCP.

    A sender's memory is that of its two largest versions, a receiver's that of its largest.

    Raises:
        ConfigError: `listen` is not an address, or is not loopback and there is no key.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False,
        zero_copy=False,
        elastic=True,
        devices=("cpu",),
        caches=True,
        shares=True,
        prefetches=True,
        relays=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        key = load_key()
        host = listen_address(self._config.listen, allowed=bool(key), need=f"a key: {HOW_TO_SET}")
        self._relay = HostRelay()
        self._transport = TcpTransport(
            self.name, host, key, self._sending.versions.find, newest=lambda: self._sending.newest
        )

    def prepare(self) -> bytes:
        """Start to listen and return the metadata. A receiver does not listen if `listen` is
        another host's address."""
        return self._transport.member()

    def _identity(self) -> bytes:
        return self._transport.sending_member()

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            read_member(member, cls.name)

    def _forget_sender(self) -> None:
        self._transport.hang_up()

    def _new_store(self) -> Slot:
        return Slot()

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        self.relayed = is_relayed(manifest)
        if self.relayed:
            try:
                return await self._copy_relayed(manifest, deadline)
            except WeightSyncError as error:
                deadline.check()
                _log.warning(
                    "Version %d is received from the sender, because it can't be copied on this host: %s",
                    manifest.version,
                    error,
                )
                self.relayed = False
        return await super()._fetch(manifest, deadline)

    async def _copy_relayed(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        buffer = self._buffers.next()
        buffer.forget()
        copy = buffer.reserve(manifest.payload_nbytes)
        self.verify_seconds = await self._relay.copy(manifest, copy, deadline)
        return buffer.tensors(manifest)

    async def relay(self, *, timeout_s: float) -> Manifest:
        received, weights = self.get_weights()
        deadline = Deadline(timeout_s, f"Relaying version {received.version}", f"engine {self.name}")
        return await self._relay.publish(received, weights, deadline)

    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        return self._transport.pull(manifest, buckets, deadline)

    def _pull_ahead(self, buckets: Sequence[Bucket], prefetch: Prefetch) -> AsyncGenerator[None]:
        assert self._sender is not None, "only a receiver that has joined prefetches"
        return self._transport.pull_ahead(self._sender, buckets, prefetch)

    def _on_progress(self, store: Slot, written: int) -> None:
        store.advance(written)

    def close(self) -> None:
        self._transport.close()
        self._relay.close()
        with self._transport.lock:
            super().close()
