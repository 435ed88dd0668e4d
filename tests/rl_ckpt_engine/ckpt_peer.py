"""A process with one endpoint, driven over pipes: each JSON line in is answered by one line out.

Usage: `python ckpt_peer.py sender|receiver NAME ENGINE DIRECTORY`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineRegistry,
    ReceiverEndpoint,
    SendAck,
    SenderEndpoint,
)
from rl_ckpt_engine.endpoints.operations import METHODS
from rl_ckpt_engine.engines.one_host.cuda_ipc import CudaIpcEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import RLError

sys.path.insert(0, str(Path(__file__).parent))

from ckpt_device import SharedMemoryDevice
from ckpt_fakes import Sink, Source

SHAPES = [(1000, 100), (), (0,), (33,)]


def over_a_stand_in(engine: str, config: CheckpointEngineConfig) -> CudaIpcEngine:
    return CudaIpcEngine(config, SharedMemoryDevice())


class VersionedSender(SenderEndpoint):
    """Sends other weights with each version."""

    async def send(self, version: int, timeout_s: float) -> SendAck:
        self._source.weights = make_weights(SHAPES, seed=version)
        return await super().send(version, timeout_s)


class Peer:
    def __init__(self, role: str, name: str, engine: str, directory: str) -> None:
        stand_in = engine == "cuda_ipc"  # "cuda_ipc-gpu" is the engine on a GPU
        engine = engine.removesuffix("-gpu")
        config = CheckpointEngineConfig(backend=engine, directory=directory)
        create = over_a_stand_in if stand_in else CheckpointEngineRegistry().create
        self.sink = Sink(make_weights(SHAPES))
        if role == "sender":
            self.endpoint = VersionedSender(create(engine, config), Source([]))
        else:
            self.endpoint = ReceiverEndpoint(create(engine, config), self.sink, name=name)

    async def call(self, method: str, payload: str) -> str:
        if method == "loaded":
            loaded = {name: data.hex() for name, data in self.sink.loaded.items()}
            return json.dumps([self.sink.weight_version, loaded]).encode().hex()
        return (await self.endpoint.handle(method.removeprefix(METHODS), bytes.fromhex(payload))).hex()


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # transport libraries print to stdout
    peer = Peer(*sys.argv[1:])
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = {"ok": await peer.call(*json.loads(line))}
        except RLError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    asyncio.run(main())
