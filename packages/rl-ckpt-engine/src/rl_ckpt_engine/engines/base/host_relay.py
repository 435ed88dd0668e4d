"""Relay a received version to the other receivers of a host, through shared memory.

The receiver that relays copies the version once into memory that the others map (see
sender_memory) and copy into memory of their own. So a version crosses the network once for each
host. The manifest of a relayed version is that of the sender, except for the placement, which
begins with `_MARK`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.engines.base.memfd import SealedSlot
from rl_ckpt_engine.engines.base.sender_memory import SenderMemory, ShmMember
from rl_ckpt_engine.payload.block_stream import Deadline, emit
from rl_ckpt_engine.payload.manifest import Manifest, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host_identity import this_host

_MARK = b"relay\0"


class _Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a version is relayed."""

    member: bytes
    """Msgpack of ShmMember."""
    slot: bytes
    """Msgpack of SlotPlacement."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Placement)
_member_decoder = msgspec.msgpack.Decoder(ShmMember)


def is_relayed(manifest: Manifest) -> bool:
    """Whether a receiver of this host serves the version."""
    return manifest.placement.startswith(_MARK)


class HostRelay:
    """Both ends of a relay; a receiver uses one of them in each sync."""

    def __init__(self) -> None:
        self._slot: SealedSlot | None = None
        self._memory = SenderMemory()
        self._relaying = b""  # the member whose slot it maps

    async def publish(self, received: Manifest, weights: Sequence[WeightTensor], deadline: Deadline) -> Manifest:
        """Copy a received version into shared memory; returns its manifest for other receivers.

        Raises:
            WeightSyncError: the weights are not those of the manifest any more, there is not enough
                memory, or the deadline passed.
        """
        slot = self._slot = self._slot or SealedSlot()
        try:
            slot.begin(received.version)
            entries = await emit(weights, slot, deadline)
            if entries != received.tensors:
                raise WeightSyncError(f"The weights of version {received.version} changed while they were copied.")
            member = ShmMember(host=this_host(), pid=os.getpid())
            placement = _Placement(member=_encoder.encode(member), slot=slot.placement)
            relayed = msgspec.structs.replace(
                received, placement=_MARK + _encoder.encode(placement), digest=b""
            ).sealed()
            slot.complete(_in_memory(relayed, placement))
        except OSError as error:
            self.close()
            raise WeightSyncError(f"Version {received.version} can't be relayed: {error}.") from error
        return relayed

    async def copy(self, relayed: Manifest, target: npt.NDArray[np.uint8], deadline: Deadline) -> float:
        """Copy a relayed version, verified; see `SenderMemory.copy`.

        Raises:
            WeightSyncError: the receiver that relays it is on another host; or see there.
        """
        placement = decode_struct(_decoder, relayed.placement[len(_MARK) :], "placement of a relayed version")
        member = decode_struct(_member_decoder, placement.member, "placement of a relayed version")
        if member.host != this_host():
            raise WeightSyncError(f"Version {relayed.version} is relayed on {member.host}, another host.")
        if placement.member != self._relaying:  # the memory of one that relays no more is freed
            self._memory.clear()
            self._relaying = placement.member
        return await self._memory.copy(_in_memory(relayed, placement), target, deadline)

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        if self._slot is not None:
            self._slot.close()
            self._slot = None
        self._memory.clear()


def _in_memory(relayed: Manifest, placement: _Placement) -> Manifest:
    """The manifest of the copy in shared memory, as its readers check it."""
    return msgspec.structs.replace(relayed, sender=placement.member, placement=placement.slot)
