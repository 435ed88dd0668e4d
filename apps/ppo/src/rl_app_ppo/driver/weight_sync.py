"""The manager of the weight synchronization, with handles to the endpoints in the workers.

The driver decides which plug-ins may load and passes the decision to the workers
(BuildCall.plugins).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    FollowerEndpoint,
    PluginPolicy,
    ReceiverEndpoint,
    SenderEndpoint,
    remote,
)
from rl_ckpt_engine.sync.progress import ProgressCallback
from rl_trainer import WorkerHandle

OnStep = Callable[[int, Mapping[str, float]], None]


def make_sync(
    config: CheckpointEngineConfig,
    plugins: PluginPolicy,
    actor: Sequence[WorkerHandle],
    rollout: Sequence[WorkerHandle],
    progress: ProgressCallback | None = None,
    *,
    one_process: bool = False,
) -> CheckpointEngineManager:
    """Create the manager of all rollout workers.

    Args:
        config: which engine and manager.
        plugins: which plug-ins may load.
        actor: all ranks; the first sends.
        rollout: all replicas.
        progress: called during slow syncs.
        one_process: each replica is in the process of the rank of the same number, which sends it
            the weights there.

    Raises:
        ConfigError: see `make_engine`; or the manager may not be loaded.
    """
    registry = CheckpointEngineRegistry(plugins)
    first, *others = actor
    beside = (
        {replica.name: remote(SenderEndpoint, rank) for replica, rank in zip(rollout[1:], others, strict=True)}
        if one_process
        else {}
    )
    return registry.manager(config)(
        remote(SenderEndpoint, first),
        [remote(ReceiverEndpoint, worker) for worker in rollout],
        config,
        registry.resolve(config),
        progress,
        followers=[] if one_process else [remote(FollowerEndpoint, rank) for rank in others],
        local_senders=beside,
    )


def measured(sync: CheckpointEngineManager, on_step: OnStep) -> OnStep:
    """Add the manager's metrics to those of steps that synchronized."""

    def record(step: int, metrics: Mapping[str, float]) -> None:
        on_step(step, {**sync.metrics, **metrics} if "weight_sync/version" in metrics else metrics)

    return record
