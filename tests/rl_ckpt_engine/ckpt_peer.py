"""A process with one endpoint, driven over pipes: one JSON line in per call, one out per answer.
`python ckpt_peer.py sender|receiver NAME ENGINE DIRECTORY`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineRegistry, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.cuda_ipc import CudaIpcEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import RLError

sys.path.insert(0, str(Path(__file__).parent))

from ckpt_device import SharedMemoryDevice
from ckpt_fakes import Sink, Source

SHAPES = [(1000, 100), (), (0,), (33,)]
T = 20.0


def over_a_stand_in(engine: str, config: CheckpointEngineConfig) -> CudaIpcEngine:
    return CudaIpcEngine(config, SharedMemoryDevice())


class Peer:
    def __init__(self, role: str, name: str, engine: str, directory: str) -> None:
        stand_in = engine == "cuda_ipc"  # "cuda_ipc-gpu" is the engine on a GPU
        engine = engine.removesuffix("-gpu")
        config = CheckpointEngineConfig(backend=engine, directory=directory)
        create = over_a_stand_in if stand_in else CheckpointEngineRegistry().create
        self.sink = Sink(make_weights(SHAPES))
        self.source = Source([])
        self.sender = SenderEndpoint(create(engine, config), self.source) if role == "sender" else None
        self.receiver = ReceiverEndpoint(create(engine, config), self.sink, name=name)

    async def call(self, method: str, *args: object) -> object:
        if method == "loaded":
            return [self.sink.weight_version, {name: data.hex() for name, data in self.sink.loaded.items()}]
        if method == "send":
            self.source.weights = make_weights(SHAPES, seed=int(args[0]))
            return (await self.sender.send(int(args[0]), T)).hex()
        if method == "receive":
            ack = await self.receiver.receive(bytes.fromhex(str(args[0])), T)
            return [ack.version, ack.digest.hex(), ack.seconds]
        if method == "republish":
            return (await (self.sender or self.receiver).republish(T)).hex()
        if method == "prepare":
            return (await (self.sender or self.receiver).prepare()).hex()
        if method == "join":
            return await (self.sender or self.receiver).join(bytes.fromhex(str(args[0])), float(str(args[1])))
        if method == "serve":
            return await self.sender.serve(bytes.fromhex(str(args[0])), T)
        target = self.sender if method in ("finalize", "abort") else self.receiver
        return await getattr(target, method)(*args)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # transport libraries print what they have to say
    peer = Peer(*sys.argv[1:])
    for line in sys.stdin:
        try:
            answer = {"ok": asyncio.run(peer.call(*json.loads(line)))}
        except RLError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
