"""A sender and a receiver of a pulling engine, with access to the sender's bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from rl_ckpt_engine import CheckpointEngineConfig, Manifest
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.storage.disk import DiskEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.batch.weight_tensor import WeightTensor

T = 120.0


ENGINES = ["tcp", "disk"]


WEIGHTS = make_weights([(300, 100), (), (0,), (100, 300), (7,)], seed=1)


class Pair:
    """Sender and receiver of one engine; tests can change the sender's bytes."""

    def __init__(self, engine: str, directory: Path) -> None:
        config = CheckpointEngineConfig(directory=str(directory), bucket_mb=64 / 1024)
        make = {"tcp": TcpEngine, "disk": DiskEngine}[engine]
        self.sender, self.receiver = make(config), make(config)
        self.directory = directory
        self.receiver.init_process_group(
            make.build_topology(self.sender.prepare(), [self.receiver.prepare()]).receivers[0]
        )

    def send(self, weights: list[WeightTensor] = WEIGHTS, version: int = 1) -> Manifest:
        return asyncio.run(self.sender.send_weights(weights, version, timeout_s=T))

    def receive(self, manifest: Manifest) -> list[WeightTensor]:
        return asyncio.run(self.receiver.receive_weights(manifest, timeout_s=T))

    def tamper(self, manifest: Manifest, change: Callable[[bytearray], None]) -> None:
        """Change the bytes of the first and fourth tensor in the sender's storage."""
        for entry in (manifest.tensors[0], manifest.tensors[3]):
            fd, at = self.place(manifest, entry.name)
            data = bytearray(os.pread(fd, entry.nbytes, at))
            change(data)
            os.pwrite(fd, data, at)
            if isinstance(self.sender, DiskEngine):
                os.close(fd)

    def place(self, manifest: Manifest, name: str) -> tuple[int, int]:
        index = [e.name for e in manifest.tensors].index(name)
        if isinstance(self.sender, TcpEngine):
            held = self.sender._sending.versions.find(manifest.sync_id).held
            return held.fd, PAYLOAD_START + manifest.tensors[index].offset
        where = msgspec.msgpack.decode(manifest.placement)
        number, at = where["places"][index]
        return os.open(self.directory / where["folder"] / where["files"][number], os.O_RDWR), at

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
