"""Everything that a model's state_dict holds arrives, and only what fits is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import torch

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.shm import ShmEngine
from rl_ckpt_engine.engines.tcp import TcpEngine
from rl_protocol.torch import from_weight, to_weight
from rl_protocol.weights import WeightTensor


class Model(torch.nn.Module):
    """Parameters, one of them transposed in memory and two tied; buffers, a scalar and an empty one among them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(50, 8, generator=draw))
        self.head = self.embed
        self.turned = torch.nn.Parameter(torch.randn(8, 50, generator=draw).t())
        self.norm = torch.nn.BatchNorm1d(8)
        self.norm.num_batches_tracked.fill_(seed)
        self.register_buffer("running", torch.randn(3, generator=draw).to(torch.bfloat16))
        self.register_buffer("none_yet", torch.empty(0, 4))


class Ends:
    """The model as source, and as sink."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.weight_version = 0

    def named_weights(self) -> Iterable[WeightTensor]:
        return (to_weight(name, tensor) for name, tensor in self.model.state_dict().items())

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        self.model.load_state_dict({weight.name: from_weight(weight) for weight in weights})
        self.weight_version = version


@pytest.mark.parametrize("engine", [ShmEngine, TcpEngine])
def test_parameters_and_buffers_arrive_however_they_lie_in_memory(engine: type[CheckpointEngine]) -> None:
    source, sink = Ends(Model(1)), Ends(Model(2))
    assert not source.model.turned.is_contiguous()
    replica = ReceiverEndpoint(engine(), sink, name="r0")
    manager = CheckpointEngineManager(sender := SenderEndpoint(engine(), source), [replica])
    asyncio.run(manager.update_weights(1))
    want, got = source.model.state_dict(), sink.model.state_dict()
    assert len(want) == 10
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert sink.model.norm.num_batches_tracked.item() == 1
    sender.close()
    replica.close()
