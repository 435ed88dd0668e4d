"""What a relay brings where several replicas of a host receive weights over TCP.

Receivers on this host, each in a process of its own, get the weights by the manager and engine
`tcp`, prefetch included. In turns, all get them from the sender, and one gets them and relays them
to the others.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from harness.pairs import Subject, paired, summary, take_turns
from harness.weight_sync.bars import RELAYED, judged
from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.endpoints.unix_socket import connect, serve
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.sync import process_groups
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import WeightCapabilities

T = 300.0
_spawn = multiprocessing.get_context("spawn")
_NEVER = 1 << 30


class Keeps:
    """A replica that uses the received tensors in place."""

    capabilities = WeightCapabilities(adopts=True)

    def __init__(self) -> None:
        self.weight_version = 0
        self.held: tuple[Any, ...] = ()

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Never called: the tensors are adopted."""
        raise NotImplementedError

    def adopt_weights(self, weights: list[WeightTensor], version: int, watch: Any) -> None:
        self.held, self.weight_version = (weights, watch), version


def receive(path: str, name: str) -> None:
    """A rollout process: serves its endpoint until it is ended."""

    async def run() -> None:
        async with serve(ReceiverEndpoint(TcpEngine(), Keeps(), name=name), Path(path)):
            await asyncio.Event().wait()

    asyncio.run(run())


class Models:
    """A trainer with the next of its versions in each sync."""

    capabilities = WeightCapabilities()

    def __init__(self, models: list[list[WeightTensor]]) -> None:
        self.models = models
        self.version = 0

    def named_weights(self) -> Iterable[WeightTensor]:
        return iter(self.models[self.version % len(self.models)])


class Side:
    """A sender with its receivers; `relay_from` as in rl_ckpt_engine."""

    def __init__(self, receivers: int, models: list[list[WeightTensor]], folder: str, relay_from: int) -> None:
        self.relay_from = relay_from
        self.source = Models(models)
        self.loop = asyncio.new_event_loop()
        paths = [f"{folder}/{number}" for number in range(receivers)]
        self.processes = [
            _spawn.Process(target=receive, args=(path, f"r{number}"), daemon=True) for number, path in enumerate(paths)
        ]
        for process in self.processes:
            process.start()
        self.pids = [os.getpid(), *(process.pid for process in self.processes if process.pid)]
        self.engine = TcpEngine()
        self.manager = self.loop.run_until_complete(self.connected(paths))

    async def connected(self, paths: list[str]) -> CheckpointEngineManager:
        replicas = [await connect(ReceiverEndpoint, Path(path), timeout_s=T) for path in paths]
        config = CheckpointEngineConfig(timeout_s=T)
        return CheckpointEngineManager(SenderEndpoint(self.engine, self.source), replicas, config, TcpEngine)

    def step(self) -> None:
        """One whole sync."""
        process_groups.RELAY_FROM, process_groups.RELAY_BYTES = self.relay_from, 1
        self.source.version += 1
        self.loop.run_until_complete(self.manager.update_weights(self.source.version))
        assert len(self.manager.receivers) == len(self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join(20)
        self.engine.close()
        self.loop.close()


def measure_relay(receivers: int, models: list[list[WeightTensor]], pairs: int) -> dict[str, Any]:
    """The row of so many receivers."""
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        closing(Side(receivers, models, one, receivers)) as relayed,
        closing(Side(receivers, models, other, _NEVER)) as direct,
    ):
        subjects = [Subject(name, side.step, side.pids) for name, side in (("relayed", relayed), ("direct", direct))]
        timings = take_turns(subjects, pairs, warm_up=3)
        relays = relayed.manager.metrics["weight_sync/relayed"]
        assert (relays, direct.manager.metrics["weight_sync/relayed"]) == (receivers - 1, 0)
    wall = paired(timings, "relayed", "direct")
    return judged(
        f"tcp, {receivers} receivers: {RELAYED}",
        wall["median"],
        wall_ratio=wall,
        cpu_ratio=paired(timings, "relayed", "direct", "cpu"),
        sides=summary(timings, sum(weight.nbytes for weight in models[0])),
    )
