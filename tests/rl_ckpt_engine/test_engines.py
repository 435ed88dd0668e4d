"""Both engines against the conformance suite of the package."""

from rl_ckpt_engine import CheckpointEngine
from rl_ckpt_engine.engines.naive import NaiveEngine
from rl_ckpt_engine.engines.shm import ShmEngine
from rl_ckpt_engine.testing import EngineConformance


class TestNaive(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return NaiveEngine()


class TestShm(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return ShmEngine()
