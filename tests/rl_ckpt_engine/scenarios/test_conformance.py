"""Every built-in engine passes the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, Manifest, TensorSpec
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.network.torch_group import GlooEngine
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.engines.one_host.shm_copy import ShmCopyEngine
from rl_ckpt_engine.engines.storage.disk import DiskEngine
from rl_ckpt_engine.testing import EngineConformance
from rl_protocol.batch.weight_tensor import WeightTensor


class TestNaive(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return NaiveEngine()


class TestShm(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return ShmEngine()


class TestShmCopy(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return ShmCopyEngine()


class TestShmDirect(EngineConformance):
    """The tensors are written into shared memory before they are sent."""

    def make_engine(self) -> CheckpointEngine:
        return ShmEngine()

    def send(self, sender: CheckpointEngine, weights: Sequence[WeightTensor], version: int) -> Manifest:
        assert isinstance(sender, ShmEngine)
        room = sender.room([TensorSpec(w.name, w.dtype, w.shape) for w in weights])
        for weight, data in zip(weights, room, strict=True):
            data[:] = weight.data
        moved = [WeightTensor(w.name, w.dtype, w.shape, data) for w, data in zip(weights, room, strict=True)]
        return super().send(sender, moved, version)


class TestTcp(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return TcpEngine()


class TestTcpInSmallBuckets(EngineConformance):
    """Every tensor larger than a kilobyte takes several buckets."""

    def make_engine(self) -> CheckpointEngine:
        return TcpEngine(CheckpointEngineConfig(bucket_mb=1000 / 2**20))

    # 16 MiB in pieces of a kilobyte would take long and test nothing more
    test_odd_shapes_arrive = None


class TestGloo(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return GlooEngine(CheckpointEngineConfig(bucket_mb=1))


@pytest.mark.gpu
class TestNccl(EngineConformance):
    """Each engine has a GPU of its own: NCCL refuses a group with two members on one."""

    @pytest.fixture(autouse=True)
    def _gpus(self) -> None:
        self.gpus = iter(range(torch.cuda.device_count()))

    def make_engine(self) -> CheckpointEngine:
        gpu = next(self.gpus, None)
        if gpu is None:
            pytest.skip("there is no further GPU")
        torch.cuda.set_device(gpu)
        return CheckpointEngineRegistry().create("nccl")


class TestDisk(EngineConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_engine(self) -> CheckpointEngine:
        return DiskEngine(CheckpointEngineConfig(directory=str(self.directory / "weights"), bucket_mb=1))
