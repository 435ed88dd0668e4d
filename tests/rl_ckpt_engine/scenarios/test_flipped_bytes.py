"""A flipped byte in any block is refused by every engine, whatever the size of the last block."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from ckpt_pair import Pair, T

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, Manifest
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.network.torch_group import GlooEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.engines.one_host.shm_copy import ShmCopyEngine
from rl_ckpt_engine.payload.digests import BLOCK_BYTES
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal

SIZES = (2 * BLOCK_BYTES + 5, 0, BLOCK_BYTES, 3, BLOCK_BYTES - 1)
LAST_BYTES = [
    (number, min(start + BLOCK_BYTES, size) - 1)
    for number, size in enumerate(SIZES)
    for start in range(0, size, BLOCK_BYTES)
]
"""The tensor and the last byte of each block."""
WEIGHTS = make_weights([(size,) for size in SIZES], dtype="uint8")


class Joined(EngineConformance):
    """A connected sender and receiver of an engine."""

    def __init__(self, engine: type[CheckpointEngine]) -> None:
        self._engine = engine
        self.sender, self.receiver = self.joined()

    def make_engine(self) -> CheckpointEngine:
        return self._engine(CheckpointEngineConfig(bucket_mb=0.3))

    async def error_of_the_receiver(self, manifest: Manifest) -> object:
        """Receive, which must fail; the members of a group form a new one."""
        receiving = self.receiver.receive_weights(manifest, timeout_s=T)
        if self.sender.capabilities.elastic:
            (error,) = await asyncio.gather(receiving, return_exceptions=True)
        else:
            serving = self.sender.serve(manifest, timeout_s=T)
            error, _ = await asyncio.gather(receiving, serving, return_exceptions=True)
            await self.regroup(self.sender, self.receiver)
        return error

    def flip(self, number: int, byte: int, manifest: Manifest) -> None:
        """Flip a bit in the memory of the sender."""
        published = self.sender._sending.versions.pending
        assert published is not None
        memory = published.held._bytes
        writable, memory.flags.writeable = memory.flags.writeable, True
        memory[PAYLOAD_START + manifest.tensors[number].offset + byte] ^= 1
        memory.flags.writeable = writable


@pytest.mark.parametrize("engine", [ShmEngine, ShmCopyEngine, TcpEngine, GlooEngine])
def test_a_flipped_byte_in_any_block_is_refused(engine: type[CheckpointEngine]) -> None:
    pair = Joined(engine)
    manifest = pair.send(pair.sender, WEIGHTS, 1)
    for number, byte in LAST_BYTES:
        pair.flip(number, byte, manifest)
        error = asyncio.run(pair.error_of_the_receiver(manifest))
        assert f"'w{number}' of version 1 arrived damaged" in str(error)
        pair.flip(number, byte, manifest)
    assert_same(asyncio.run(pair.receive(pair.sender, pair.receiver, manifest)), WEIGHTS)
    pair.sender.close()
    pair.receiver.close()


def test_a_flipped_byte_in_any_block_of_a_file_is_refused(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send(WEIGHTS)
    for number, byte in LAST_BYTES:
        fd, at = pair.place(manifest, f"w{number}")
        value = os.pread(fd, 1, at + byte)[0]
        os.pwrite(fd, bytes([value ^ 1]), at + byte)
        assert f"'w{number}' of version 1 arrived damaged" in refusal(lambda: pair.receive(manifest))
        os.pwrite(fd, bytes([value]), at + byte)
        os.close(fd)
    assert_same(pair.receive(manifest), WEIGHTS)
    pair.close()
