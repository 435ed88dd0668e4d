"""Two processes: a trainer sends its weights, a rollout verifies and activates them."""

import asyncio
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np

from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    ReceiverEndpoint,
    SenderEndpoint,
    connect,
    serve,
)
from rl_protocol import WeightTensor
from rl_protocol.ports import WeightCapabilities

CONFIG = CheckpointEngineConfig(backend="shm")  # on several hosts tcp, and calls through Ray or your own RPC


class Trainer:
    capabilities = WeightCapabilities()

    def __init__(self):
        self.lm_head = np.zeros(4, np.float32)

    def named_weights(self):
        yield WeightTensor("lm_head.weight", "float32", (4,), self.lm_head.view(np.uint8))


class Rollout:
    capabilities, weight_version = WeightCapabilities(), 0

    def load_weights(self, weights, version):
        (lm_head,) = (weight.data.view(np.float32).copy() for weight in weights)
        self.weight_version = version
        print("rollout: version", version, lm_head.tolist(), flush=True)


async def generate(socket, done):
    engine = CheckpointEngineRegistry().create(CONFIG.backend)
    async with serve(ReceiverEndpoint(engine, Rollout(), name="rollout-0"), socket):
        await asyncio.to_thread(done.wait, 60)


async def train(socket, done):
    trainer = Trainer()
    sender = SenderEndpoint(CheckpointEngineRegistry().create(CONFIG.backend), trainer)
    manager = CheckpointEngineManager(sender, [await connect(ReceiverEndpoint, socket)], CONFIG)
    for version in (1, 2):
        trainer.lm_head += 1  # an optimizer step
        report = await manager.update_weights(version)
        print("trainer: version", report.version, "is active on", report.receivers)
    done.set()


def start_rollout(socket, done):
    asyncio.run(generate(socket, done))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "rollout-0.sock")
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Event()
        rollout = spawn.Process(target=start_rollout, args=(socket, done))
        rollout.start()
        asyncio.run(train(socket, done))
        rollout.join(60)
