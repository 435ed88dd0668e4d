"""Check that this machine has the optional packages and GPUs that a configuration needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_app_ppo.config.devices import PlannedProcess
from rl_app_ppo.config.placement import rollout_in_actor
from rl_app_ppo.config.schema import LOCAL, AppConfig
from rl_app_ppo.rank_network import RankNetwork, listening_in
from rl_ckpt_engine import CheckpointEngine
from rl_ckpt_engine.registry import create_engine
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_protocol.support.network_interface import find_interface
from rl_trainer.config.backends import require_gpu
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml

MOST_PER_CORE = 16
"""Processes or threads of a setting for each core that are no reason to warn."""


def check_installed_engines(config: AppConfig) -> None:
    """Check that the packages of `model_engine` and `rollout.name` are installed.

    None of them is imported.

    Raises:
        ConfigError: one is missing; has the command that installs all of them and runs.
    """
    for package in config.backend.packages:
        try:
            version(package)
        except PackageNotFoundError as error:
            pip = f"'rl-app-ppo[{config.backend.extra}]'"
            raise ConfigError(
                f"model_engine={config.model_engine} needs {package}, which is not installed. {_install(config, pip)}"
            ) from error
    if missing := config.generator.missing():
        pip = config.generator.extra(gpu_count)[1]
        raise ConfigError(
            f"rollout.name={config.rollout.name} needs {missing}, which is not installed. {_install(config, pip)}"
        )


def _install(config: AppConfig, arguments: str) -> str:
    """How to install: here with every extra of the configuration, elsewhere by `uv pip install`."""
    extras, settings = list[str](), list[str]()
    if config.backend.extra:
        extras, settings = [*extras, config.backend.extra], [*settings, f"model_engine={config.model_engine}"]
    if extra := config.generator.extra(gpu_count)[0]:
        extras, settings = [*extras, extra], [*settings, f"rollout.name={config.rollout.name}"]
    command = " ".join(["uv run", *(f"--extra {extra}" for extra in extras), "apps/ppo", *settings])
    return f"Run `{command}` followed by your other settings; outside this repository uv pip install {arguments} first."


def check_network(config: AppConfig) -> None:
    """Check that this host has the interface that `trainer.network_interface` names.

    Raises:
        ConfigError: it has not; has those of this host.
    """
    if config.trainer.network_interface:
        find_interface(config.trainer.network_interface)


def check_hosts(config: AppConfig, engine: type[CheckpointEngine]) -> None:
    """Check that what processes on several hosts use reaches across them.

    Args:
        config: the configuration of the run.
        engine: the weight engine of `checkpoint_engine.backend`.

    Raises:
        ConfigError: it does not, or the engine lacks a key; names what to change.
    """
    if config.trainer.nnodes == 1:
        return
    several = f"trainer.nnodes={config.trainer.nnodes}"
    if config.ray.address == LOCAL:
        raise ConfigError(
            f"{several} needs a Ray cluster with as many nodes, and ray.address={LOCAL} starts Ray on this machine alone; set ray.address=auto "
            "or host:port of a cluster (ray start --head; ray start --address=host:port), or trainer.nnodes=1."
        )
    if not config.transfer_queue.listen:
        raise ConfigError(
            f"{several} needs a data plane that processes of other hosts reach; set transfer_queue.listen to an address of this host and its "
            "key, or trainer.nnodes=1."
        )
    check_engine_of_hosts(config, engine)
    if _sends(config) and "cpu" in engine.capabilities.devices:
        try:
            create_engine(engine, listening_in(_network(config), config.checkpoint_engine)).close()
        except ConfigError as error:
            raise ConfigError(f"{several}: {error}") from error


def check_engine_of_hosts(config: AppConfig, engine: type[CheckpointEngine]) -> None:
    """Check that the weight engine reaches all hosts, a part of `check_hosts`."""
    several = f"trainer.nnodes={config.trainer.nnodes}"
    if engine.capabilities.same_host_only and config.trainer.nnodes > 1 and _sends(config):
        raise ConfigError(
            f"{several}, but checkpoint_engine.backend={config.checkpoint_engine.backend} works within one host; set it to tcp, "
            "whose ends need a key (RL_CKPT_KEY_FILE), or to disk, in a folder that all hosts share, or set trainer.nnodes=1."
        )


def _sends(config: AppConfig) -> bool:
    """Whether weights move between processes."""
    return config.checkpoint_engine.enabled and not rollout_in_actor(config.placement)


def _network(config: AppConfig) -> RankNetwork:
    """The network between the hosts, as far as it is known before the start: that of the data
    plane's address, of an IPv6 address nothing."""
    plane = config.transfer_queue.listen
    host = plane.rpartition(":")[0] or plane
    return RankNetwork(interface=config.trainer.network_interface, peer="" if ":" in host else host)


def check_gpus(config: AppConfig, sync_devices: tuple[str, ...]) -> None:
    """Check that this machine has the GPUs that the settings need, if the workers run on it.

    Args:
        config: the configuration of the run.
        sync_devices: devices on which the weight engine of `checkpoint_engine.backend` works.

    Raises:
        ConfigError: names the setting, and its value without a GPU.
    """
    if config.ray.address != "local":
        return
    config.engine.check_gpus(f"{config.model_engine}.", gpu_count)
    config.generator.check_gpus(gpu_count)
    for setting, remedy in _asked(config, sync_devices).items():
        require_gpu(gpu_count(), setting, remedy)


def check_sync_on_gpus(config: AppConfig, planned: Sequence[PlannedProcess], sync_devices: tuple[str, ...]) -> None:
    """Check that actor and rollout compute on GPUs where the weight engine needs them.

    Args:
        config: the configuration of the run.
        planned: its processes.
        sync_devices: devices on which the weight engine of `checkpoint_engine.backend` works.

    Raises:
        ConfigError: one computes on the CPU; names its setting, and an engine that works there.
    """
    if not config.checkpoint_engine.enabled or "cpu" in sync_devices:
        return
    for role in ("actor", "rollout"):
        if any(role in process.roles and not process.uses_gpus for process in planned):
            raise ConfigError(
                f"checkpoint_engine.backend={config.checkpoint_engine.backend} moves weights between GPUs, and the {role} computes on the CPU. "
                "Set checkpoint_engine.backend=shm, or have actor and rollout on GPUs; `rl plan` shows the device of each process."
            )


def check_cores(config: AppConfig, planned: Sequence[PlannedProcess], cores: int) -> None:
    """Check that this machine has cores for the processes and threads that the settings ask for.

    Args:
        config: the configuration of the run.
        planned: its processes.
        cores: those that its processes may run on.

    Raises:
        ConfigError: a setting asks for more than `MOST_PER_CORE` for each core; names all such.
    """
    asked = {
        "rollout.num_workers": config.rollout.num_workers,
        f"{config.model_engine}.world_size": sum("actor" in process.roles for process in planned),
        "reward.num_workers": config.reward.num_workers,
        "transfer_queue.num_storage_units": config.transfer_queue.num_storage_units,
        "trainer.threads_per_worker": config.trainer.threads_per_worker,
    }
    most = MOST_PER_CORE * cores
    if many := ", ".join(f"{key}={count}" for key, count in asked.items() if count > most):
        raise ConfigError(
            f"{many} with {counted(cores, 'core')}: so many processes or threads wait for each other, and each process takes memory. "
            f"Set at most {most} ({MOST_PER_CORE} for each core)."
        )


def _asked(config: AppConfig, sync_devices: tuple[str, ...]) -> dict[str, str]:
    """Each setting that needs a GPU -> what to set without one; the engines have their own."""
    asked: dict[str, str] = {}
    if config.checkpoint_engine.enabled and "cpu" not in sync_devices:
        asked[f"checkpoint_engine.backend={config.checkpoint_engine.backend}"] = "checkpoint_engine.backend=shm"
    if config.rollout.device == "cuda":
        asked["rollout.device=cuda"] = "rollout.device=cpu or auto"
    for term in parse_terms(config.reward.function):
        if is_scorer_toml(term.name):
            described = read_scorer_toml(term.name)
            if isinstance(described, RewardModelConfig) and described.device == "cuda":
                asked[f'device = "cuda" of {term.name} in reward.function'] = 'device = "cpu" or "auto" there'
    return asked


def gpus_found() -> int:
    """`gpu_count`, without the import of torch where no driver offers a GPU."""
    return gpu_count() if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() else 0


def gpu_memory() -> int:
    """Bytes of the smallest GPU that torch can use on this machine; 0: there is none."""
    import torch  # see gpu_count

    return min((torch.cuda.get_device_properties(i).total_memory for i in range(gpu_count())), default=0)


def gpu_count() -> int:
    """Number of GPUs that torch can use on this machine."""
    import torch  # takes seconds to import, so only if a setting needs it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
