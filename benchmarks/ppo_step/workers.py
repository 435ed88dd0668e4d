"""Worker processes: Ray actors that are rollout, actor and reference in one."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec
import ray


@ray.remote(num_cpus=0, max_restarts=0)
class WorkerProcess:
    """One worker, one call at a time; names travel as bytes, to count them exactly."""

    def __init__(self, rank: int) -> None:
        import torch  # here and below: the driver needs the class, not what its processes need

        torch.set_num_threads(1)
        self._rank = rank
        self._stores: dict[str, Any] = {}

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def connect(self, plane: str, kind: str, info: Any) -> None:
        """Connect to a plane: kind `ours` or `peer`."""
        from ppo_step.stores import OurStore, PeerStore

        self._stores[plane] = OurStore(info) if kind == "ours" else PeerStore(info)

    def load(self, workload: bytes) -> None:
        """Prepare for a point of the comparison; reset a real policy."""
        from ppo_step.compute import Workload, make_compute
        from ppo_step.graph import step_graph
        from ppo_step.payloads import FAMILIES

        point = msgspec.msgpack.decode(workload, type=Workload)
        self._family, self._layout = FAMILIES[point.family], point.layout
        self._graph = step_graph(self._family)
        self._compute = make_compute(point, self._rank)

    def join(self, address: str, world: int) -> None:
        """Sum gradients with the other workers."""
        import torch.distributed

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", init_method=address, rank=self._rank, world_size=world)

    def run(self, plane: str, name: str, call: bytes) -> bytes:
        """Run a stage over rows of a data plane."""
        from ppo_step.stores import as_declared
        from rl_protocol import BatchData
        from rl_trainer.workers.messages import StageCall, StageResult

        asked = msgspec.msgpack.decode(call, type=StageCall)
        store, stage, keys = self._stores[plane], self._graph[name], asked.batch.keys
        data = BatchData({}, len(keys))
        if stage.reads:
            kinds = {field: self._kind(field) for field in stage.reads}
            data = as_declared(store.get(keys, stage.reads), kinds)
        out = self._compute.stage(stage, asked.step, keys, data)
        if stage.writes:
            store.put(keys, out)
        return msgspec.msgpack.encode(StageResult())

    def run_with(self, name: str, call: bytes, carrier: str, carried: Any) -> Any:
        """Run a stage over rows in the call (None for rollout); return the written columns."""
        from ppo_step.stores import CARRIERS
        from rl_protocol import BatchData
        from rl_trainer.workers.messages import StageCall

        asked = msgspec.msgpack.decode(call, type=StageCall)
        keys = asked.batch.keys
        data = BatchData({}, len(keys)) if carried is None else carried.batch
        return CARRIERS[carrier](self._compute.stage(self._graph[name], asked.step, keys, data))

    def clear(self, plane: str, call: bytes) -> bytes:
        """Remove rows from a data plane."""
        from rl_trainer.workers.messages import StageCall

        self._stores[plane].clear(msgspec.msgpack.decode(call, type=StageCall).batch.keys)
        return b""

    def computed(self) -> dict[str, float]:
        """Seconds of each stage since the last call."""
        seconds = dict(self._compute.seconds)
        self._compute.seconds.clear()
        return seconds

    def digest(self) -> str:
        """Digest of this worker's parameters."""
        from ppo_step.compute import TinyPolicy

        assert isinstance(self._compute, TinyPolicy)
        return hashlib.sha256(self._compute.parameters()).hexdigest()

    def _kind(self, field: str) -> str:
        kind = self._family.spec(field).kind
        return "dense" if kind == "ragged" and self._layout == "padded" else kind
