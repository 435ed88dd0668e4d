"""Check that the weight engine and manager can be loaded and work across processes."""

from __future__ import annotations

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineRegistry,
    PluginPolicy,
)
from rl_ckpt_engine.registry import create_engine
from rl_protocol import ConfigError


def check_sync(
    config: CheckpointEngineConfig, plugins: PluginPolicy, *, one_process: bool = False
) -> type[CheckpointEngine]:
    """Check what `make_engine` and `make_sync` need; returns the class of the engine.

    Args:
        config: which engine and manager.
        plugins: which plug-ins may load.
        one_process: actor and rollout are in one process.

    Raises:
        ConfigError: engine or manager can't be loaded, or the engine works within one process only.
    """
    registry = CheckpointEngineRegistry(plugins)
    engine = registry.resolve(config)
    registry.manager(config)
    if engine.capabilities.same_process_only and not one_process:
        raise ConfigError(
            f"checkpoint_engine.backend={engine.name} works within one process, but trainer and rollout are separate processes; set it to "
            "shm, or set placement=fused."
        )
    if "cpu" in engine.capabilities.devices:  # the driver may have no GPU
        create_engine(engine, config).close()
    return engine
