"""The torch backends and the transformers engine pass the test suites of their ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_protocol import WeightTensor
from rl_protocol.ports import CriticBackend, PolicyBackend, RolloutEngine
from rl_protocol.testing.rollout_suite import RolloutEngineSuite
from rl_protocol.testing.training_suite import CriticBackendSuite, PolicyBackendSuite
from rl_protocol.torch import from_weight, to_weight
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, OptimConfig
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rollout.hf_engine import HFRolloutEngine


class _WithModel:
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, model_path: Path) -> None:
        cls.path = model_path


class TestTorchPolicy(_WithModel, PolicyBackendSuite):
    @contextmanager
    def open_policy(self) -> Iterator[PolicyBackend]:
        yield TorchPolicyBackend(self.path, ActorConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=4), seed=0)


class TestLoraPolicy(_WithModel, PolicyBackendSuite):
    @contextmanager
    def open_policy(self) -> Iterator[PolicyBackend]:
        config = ActorConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=4)
        yield TorchPolicyBackend(self.path, config, lora=LoraConfig(rank=4), seed=0)


class TestPackedPolicy(_WithModel, PolicyBackendSuite):
    @contextmanager
    def open_policy(self) -> Iterator[PolicyBackend]:
        config = ActorConfig(
            optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=4, ppo_max_token_len=9, use_remove_padding=True
        )
        yield TorchPolicyBackend(self.path, config, seed=0)


class TestTorchCritic(_WithModel, CriticBackendSuite):
    @contextmanager
    def open_critic(self) -> Iterator[CriticBackend]:
        yield TorchCriticBackend(
            self.path, CriticConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=4), rollout_n=1, seed=0
        )


class TestHFRollout(_WithModel, RolloutEngineSuite):
    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        """As the tokenizer of the model, whose words are the digits and `+` and `=`."""
        return " ".join("0123456789+="[token - 2] for token in ids if token > 1)

    @contextmanager
    def open_engine(self) -> Iterator[tuple[RolloutEngine, Sequence[WeightTensor]]]:
        policy = TorchPolicyBackend(self.path, None)
        others = [to_weight(weight.name, from_weight(weight) * 1.5) for weight in policy.named_weights()]
        yield HFRolloutEngine(self.path), others
