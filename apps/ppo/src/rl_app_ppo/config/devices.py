"""The GPUs of the worker processes of a run; the caller knows how many a node has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl_app_ppo.config.placement import MODELS, Role, WorkerGroup, worker_groups
from rl_app_ppo.config.schema import ALL_GPUS, AppConfig
from rl_protocol import ConfigError
from rl_trainer.config.backends import MegatronConfig
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml

_KEY = "trainer.n_gpus_per_node"


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A worker process, and the GPUs that no other process of the run uses."""

    group: WorkerGroup
    rank: int
    gpus: int = 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """What it does."""
        return self.group.roles_of(self.rank)

    @property
    def name(self) -> str:
        """Its name, and that of its log."""
        return self.group.process_name(self.rank)


class _Need(NamedTuple):
    """The GPUs on which a role computes."""

    gpus: int = 0
    setting: str = ""
    """The setting that needs them; empty: without a GPU the role computes on the CPU."""


def plan_processes(config: AppConfig, gpus: int) -> tuple[PlannedProcess, ...]:
    """The worker processes of a run on a node with so many GPUs; those of the actor come first.

    The roles of a process share its GPUs: one for a model, or those of all tensor-parallel
    processes of a rollout engine. Without GPUs everything computes on the CPU.

    Raises:
        ConfigError: a setting asks for a GPU where there is none, or there are too few; names the
            role without one, and the key to change.
    """
    usable = gpus if config.trainer.n_gpus_per_node == ALL_GPUS else config.trainer.n_gpus_per_node
    if usable > gpus:
        raise ConfigError(
            f"{_KEY}={usable}, but Ray has {gpus} GPUs on this node. Lower it, or set it to {ALL_GPUS} for as many as there are."
        )
    planned = [PlannedProcess(group, rank) for group in worker_groups(config) for rank in range(group.ranks)]
    needs: list[dict[Role, _Need]] = [{role: _need(role, config) for role in process.roles} for process in planned]
    if usable == 0:
        for asked in needs:
            _check_cpu(asked, config)
        return tuple(planned)
    wanted = [max(need.gpus for need in asked.values()) for asked in needs]
    if sum(wanted) > usable:
        optional = not any(need.setting for asked in needs for need in asked.values())
        raise _too_few(config, planned, wanted, usable, optional=optional)
    return tuple(PlannedProcess(p.group, p.rank, n) for p, n in zip(planned, wanted, strict=True))


def described_gpus(planned: Iterable[PlannedProcess]) -> str:
    """The processes with GPUs, and how many each has."""
    return ", ".join(f"{process.name} {process.gpus}" for process in planned if process.gpus)


def idle_gpus(config: AppConfig, planned: Iterable[PlannedProcess], gpus: int) -> str:
    """A warning about GPUs that stand idle while models train on the CPU; empty: none does."""
    idle = gpus - sum(process.gpus for process in planned)
    if config.engine.trains_on != "cpu" or config.trainer.n_gpus_per_node == 0 or idle <= 0:
        return ""
    return (
        f"WARNING: the models train on the CPU (model_engine={config.model_engine}) while {idle} GPUs of this node stand idle; set "
        f"{config.model_engine}.device=auto to train on a GPU, or {_KEY}=0 to use none."
    )


def _need(role: Role, config: AppConfig) -> _Need:
    match role:
        case "rollout":
            return _Need(config.generator.gpus(config.rollout), config.generator.gpu_setting(config.rollout))
        case "reward":
            devices = {name: model.device for name, model in _reward_models(config)}
            asks = next((name for name, device in devices.items() if device == "cuda"), "")
            setting = f'device = "cuda" of {asks} in reward.function' if asks else ""
            return _Need(1 if set(devices.values()) - {"cpu"} else 0, setting)
        case _:
            device = config.engine.trains_on
            setting = f"{config.model_engine}.device=cuda" if device == "cuda" else ""
            return _Need(0 if device == "cpu" else 1, setting)


def _reward_models(config: AppConfig) -> Iterable[tuple[str, RewardModelConfig]]:
    for term in parse_terms(config.reward.function):
        described = read_scorer_toml(term.name) if is_scorer_toml(term.name) else None
        if isinstance(described, RewardModelConfig):
            yield term.name, described


def _check_cpu(asked: Mapping[Role, _Need], config: AppConfig) -> None:
    """Refuse a process with a setting that needs a GPU."""
    none = f"{_KEY}=0 leaves none" if config.trainer.n_gpus_per_node == 0 else "Ray has none on this node"
    for role, need in asked.items():
        if need.setting:
            raise ConfigError(
                f"{need.setting} needs {need.gpus} GPUs for each process of {role}, and {none}. Change one of them."
            )


def _too_few(
    config: AppConfig, planned: Sequence[PlannedProcess], wanted: Sequence[int], usable: int, *, optional: bool
) -> ConfigError:
    """The error that names the first process for which no GPU is left."""
    left, missing = usable, planned[0]
    for process, gpus in zip(planned, wanted, strict=True):
        left -= gpus
        if left < 0:
            missing = process
            break
    parts = ", ".join(f"{process.name} {gpus}" for process, gpus in zip(planned, wanted, strict=True) if gpus)
    limit = "" if config.trainer.n_gpus_per_node == ALL_GPUS else f" ({_KEY})"
    cpu = f", or set {_KEY}=0 to compute on the CPU" if optional else ""
    return ConfigError(
        f"The processes need {sum(wanted)} GPUs of one node ({parts}), and {usable} can be used on this one{limit}: not enough are left for "
        f"{missing.name}. {_remedy(missing, config)}{cpu}."
    )


def _remedy(missing: PlannedProcess, config: AppConfig) -> str:
    """What to change so that a process needs fewer GPUs."""
    role = missing.roles[0]
    if role == "rollout":
        other = "set rollout.device=cpu" if config.rollout.name == "hf" else "rollout.tensor_model_parallel_size"
        return f"Lower rollout.num_workers or {other}"
    if role == "reward":
        return 'Set device = "cpu" in the file of reward.function'
    if role != "actor":
        return f"Set placement={MODELS}, so that it shares the GPUs of the actor"
    whole_replica = isinstance(config.engine, MegatronConfig) and not config.engine.world_size
    return f"Lower {config.model_engine}.{'tensor_model_parallel_size' if whole_replica else 'world_size'}"
