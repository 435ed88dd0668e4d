"""The worker's endpoint of the weight synchronization: its engine, its source, its admission."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineRegistry,
    PluginPolicy,
    ReceiverEndpoint,
)
from rl_ckpt_engine.endpoints.operations import Endpoint
from rl_ckpt_engine.registry import create_engine
from rl_protocol import WorkerError
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import WeightCapabilities


def make_engine(config: CheckpointEngineConfig, plugins: PluginPolicy) -> CheckpointEngine:
    """Create the engine of this process.

    Raises:
        ConfigError: the engine does not exist or may not be loaded, or a setting is missing.
    """
    return create_engine(CheckpointEngineRegistry(plugins).resolve(config), config)


class AdapterSource(Protocol):
    """A policy whose adapter can be read separately from its base weights."""

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """Tensors of the adapter, named as in a PEFT folder; a collective on several ranks."""
        ...


class AdapterOnly:
    """WeightSender of a policy's adapter."""

    capabilities = WeightCapabilities()

    def __init__(self, source: AdapterSource) -> None:
        self._source = source

    def named_weights(self) -> Iterable[WeightTensor]:
        return self._source.adapter_weights()


def require_admission(endpoint: Endpoint | None, method: str) -> None:
    """Refuse calls while the weights of this replica are outdated or of an unknown version.

    Raises:
        WorkerError: the last synchronization of this replica failed.
    """
    if isinstance(endpoint, ReceiverEndpoint) and not endpoint.admitting:
        raise WorkerError(
            f"{method!r} was called on a replica whose last weight synchronization failed, so its weights may be outdated or incomplete. See "
            "driver.log for the reason. It generates again after a successful synchronization or a restart; if it was late, raise "
            "checkpoint_engine.timeout_s."
        )
