"""Engine `nccl` over a stand-in that connects in its first broadcast, as NCCL does, on the CPU."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rl_ckpt_engine import CheckpointEngineConfig
from rl_ckpt_engine.engines.network import torch_group
from rl_ckpt_engine.engines.network.torch_group import GlooCollective, NcclCollective, NcclEngine
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.rendezvous import LOOPBACK_INTERFACE

WAITS = "TORCH_NCCL_BLOCKING_WAIT"
made = list[str | None]()


class LateGroup:
    """A group that meets the other members in its first broadcast."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        made.append(os.environ.get(WAITS))
        place = SimpleNamespace(rank=rank, size=size)
        self._meet = lambda: GlooCollective().form(store, place, LOOPBACK_INTERFACE, options._timeout)
        self._group = None

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        self._group = self._group or self._meet()
        return self._group.broadcast(tensor, root)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LateGroup)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")  # what the code sets is then undone
    monkeypatch.setattr(torch_group.torch, "device", lambda *_: torch.empty(0).device)
    for name, answer in {"is_available": True, "current_device": 0, "set_device": None, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


async def form(sender: NcclEngine, receiver: NcclEngine, timeout_s: float) -> None:
    topology = NcclEngine.build_topology(sender.prepare(), [receiver.prepare()])
    sender.init_process_group(topology.sender)
    receiver.init_process_group(topology.receivers[0])
    await asyncio.gather(sender.join(timeout_s=timeout_s), receiver.join(timeout_s=timeout_s))


def test_members_meet_when_they_join_and_not_on_the_event_loop() -> None:
    """Both are on one loop here: a broadcast of one that waited for the other would end neither."""
    sender, receiver = (NcclEngine(CheckpointEngineConfig(bucket_mb=0.1)) for _ in range(2))
    weights = make_weights([(1000, 100), (7,), ()], seed=3)

    async def move() -> None:
        await form(sender, receiver, 60)
        manifest = await sender.send_weights(weights, 1, timeout_s=60)
        received, _ = await asyncio.gather(
            receiver.receive_weights(manifest, timeout_s=60), sender.serve(manifest, timeout_s=60)
        )
        assert_same(received, weights)

    try:
        asyncio.run(move())
    finally:
        sender.close()
        receiver.close()


def test_a_missing_member_is_an_error_of_the_join() -> None:
    sender, receiver = NcclEngine(), NcclEngine()
    topology = NcclEngine.build_topology(sender.prepare(), [receiver.prepare()])
    sender.init_process_group(topology.sender)
    with pytest.raises(WeightSyncError, match="Joining the group of 2 as rank 0"):
        asyncio.run(sender.join(timeout_s=1))
    sender.close()
    receiver.close()


@pytest.mark.parametrize("before", [None, "0"])
def test_no_thread_of_torch_ends_the_process_when_a_member_fails(monkeypatch, before) -> None:
    """It watches all groups but those that are made while this variable is set."""
    monkeypatch.setenv(WAITS, "0") if before else monkeypatch.delenv(WAITS, raising=False)
    place = SimpleNamespace(rank=0, size=1)
    NcclCollective().form(dist.HashStore(), place, LOOPBACK_INTERFACE, timedelta(seconds=60))
    assert made == ["1"]
    assert os.environ.get(WAITS) == before, "training groups are watched"
