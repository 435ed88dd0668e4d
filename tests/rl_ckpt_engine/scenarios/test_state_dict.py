"""All tensors of a state_dict arrive; weights that do not fit are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import torch

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import WeightCapabilities
from rl_protocol.torch import from_weight, to_weight


class Model(torch.nn.Module):
    """Parameters (one transposed in memory, two tied) and buffers (a scalar, an empty one)."""

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
    """The model as a source and as a sink."""

    capabilities = WeightCapabilities()

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
