"""The GPUs of the worker processes of a run; the caller knows how many a node has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl_app_ppo.config.hosts import GPUS_KEY, NODES_KEY, HostBundle, hosts_of, ranks_together
from rl_app_ppo.config.placement import MODELS, SHARE_GPUS, Role, WorkerGroup, worker_groups
from rl_app_ppo.config.schema import ALL_GPUS, AppConfig
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer.config.backends import MegatronConfig
from rl_trainer.rewards import parse_terms
from rl_trainer.rewards.scorer_toml import RewardModelConfig, is_scorer_toml, read_scorer_toml


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A worker process, and its GPUs."""

    group: WorkerGroup
    rank: int
    gpus: int = 0
    """Those that it reserves; a process that has `lenders` reserves none."""
    host: int = 0
    """One of trainer.nnodes hosts, from 0."""
    lenders: tuple[str, ...] = ()
    """Processes on this host whose GPUs it uses, too: ranks of the actor."""

    @property
    def uses_gpus(self) -> bool:
        """Whether it has GPUs, of its own or shared."""
        return bool(self.gpus or self.lenders)

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
    """The worker processes of a run on nodes with so many GPUs; those of the actor come first.

    The roles of a process share its GPUs: one for a model, or those of all tensor-parallel
    processes of a rollout engine. Without GPUs everything computes on the CPU.

    Raises:
        ConfigError: a setting asks for a GPU where there is none, or there are too few; names the
            role without one, and the key to change. Or the ranks that lend their GPUs to a replica
            are on several hosts.
    """
    several = config.trainer.nnodes > 1
    usable = gpus if config.trainer.n_gpus_per_node == ALL_GPUS else config.trainer.n_gpus_per_node
    if usable > gpus and not several:  # several hosts are compared with the nodes; see hosts.match_nodes
        if not gpus:
            preset = f" (preset={','.join(config.preset)})" if config.preset else ""
            raise ConfigError(
                f"{GPUS_KEY}={usable}{preset}, but Ray has 0 GPUs on this node. Set {GPUS_KEY}=0 to train on the CPU, or choose a preset "
                "for it."
            )
        raise ConfigError(
            f"{GPUS_KEY}={usable}, but Ray has {counted(gpus, 'GPU')} on this node. Lower it, or set it to {ALL_GPUS} for as many as there are."
        )
    planned = [PlannedProcess(group, rank) for group in worker_groups(config) for rank in range(group.ranks)]
    needs: list[dict[Role, _Need]] = [{role: _need(role, config) for role in process.roles} for process in planned]
    if usable == 0:
        for asked in needs:
            _check_cpu(asked, config)
    lenders = [_lenders(process, planned, config) for process in planned]
    wanted = [
        max(need.gpus for need in asked.values()) if usable and not lent else 0
        for asked, lent in zip(needs, lenders, strict=True)
    ]
    hosts = hosts_of(config, [(process.group, process.rank) for process in planned], wanted, usable, lenders)
    if None in hosts:
        optional = not any(need.setting for asked in needs for need in asked.values())
        raise _too_few(config, planned[hosts.index(None)], _gpus_of(planned, wanted), usable, optional=optional)
    for process, lent in zip(planned, lenders, strict=True):
        if len({hosts[i] for i in lent}) > 1:
            raise ConfigError(
                f"{SHARE_GPUS}=true: {process.name} needs the GPUs of {', '.join(planned[i].name for i in lent)}, which are on several hosts. "
                f"Set rollout.tensor_model_parallel_size={len(lent)} to a divisor of the ranks of each host."
            )
    return tuple(
        PlannedProcess(process.group, process.rank, n, host or 0, tuple(planned[i].name for i in lent))
        for process, n, host, lent in zip(planned, wanted, hosts, lenders, strict=True)
    )


def _lenders(process: PlannedProcess, planned: Sequence[PlannedProcess], config: AppConfig) -> Sequence[int]:
    """The ranks of the actor, by their place in `planned`, whose GPUs a replica uses, too; none: it
    has its own.
    """
    if not config.rollout.share_gpus or process.roles != ("rollout",):
        return ()
    size = config.rollout.tensor_model_parallel_size
    ranks = [i for i, one in enumerate(planned) if "actor" in one.roles]
    return ranks[process.rank * size : (process.rank + 1) * size]


def described_gpus(planned: Iterable[PlannedProcess]) -> str:
    """The processes with GPUs, and how many each has."""
    processes = tuple(planned)
    own = [f"{process.name} {process.gpus}" for process in processes if process.gpus]
    lent = [f"{process.name} those of {' and '.join(process.lenders)}" for process in processes if process.lenders]
    return ", ".join(own + lent)


def host_bundles(planned: Sequence[PlannedProcess], cpus: Sequence[float]) -> tuple[HostBundle, ...]:
    """What each host needs.

    Args:
        planned: all processes.
        cpus: CPUs of each.
    """
    bundles = list[HostBundle]()
    for host in sorted({process.host for process in planned}):
        here = [(process, n) for process, n in zip(planned, cpus, strict=True) if process.host == host]
        names = tuple(process.name for process, _ in here)
        bundles.append(HostBundle(host + 1, names, sum(p.gpus for p, _ in here), sum(n for _, n in here)))
    return tuple(bundles)


def idle_gpus(config: AppConfig, planned: Iterable[PlannedProcess], gpus: int) -> str:
    """A warning about GPUs that stand idle while models train on the CPU; empty: none does."""
    idle = gpus - sum(process.gpus for process in planned)
    if config.engine.trains_on != "cpu" or config.trainer.n_gpus_per_node == 0 or idle <= 0:
        return ""
    return (
        f"the models train on the CPU (model_engine={config.model_engine}) while "
        f"{counted(idle, 'GPU')} of this node stand{'s' * (idle == 1)} idle; set "
        f"{config.model_engine}.device=auto to train on a GPU, or {GPUS_KEY}=0 to use none."
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
    none = f"{GPUS_KEY}=0 leaves none" if config.trainer.n_gpus_per_node == 0 else "Ray has none on this node"
    for role, need in asked.items():
        if need.setting:
            raise ConfigError(
                f"{need.setting} needs {counted(need.gpus, 'GPU')} for each process of {role}, and {none}. Change one of them."
            )


def _gpus_of(planned: Sequence[PlannedProcess], wanted: Sequence[int]) -> dict[str, int]:
    """Process -> its GPUs, if it has any."""
    return {process.name: gpus for process, gpus in zip(planned, wanted, strict=True) if gpus}


def _too_few(
    config: AppConfig, missing: PlannedProcess, wanted: Mapping[str, int], usable: int, *, optional: bool
) -> ConfigError:
    """The error that names the first process for which no GPU is left."""
    nodes, together = config.trainer.nnodes, ranks_together(missing.group, config)
    parts = ", ".join(f"{name} {gpus}" for name, gpus in wanted.items())
    limit = "" if config.trainer.n_gpus_per_node == ALL_GPUS else f" ({GPUS_KEY})"
    cpu = f", or set {GPUS_KEY}=0 to compute on the CPU" if optional else ""
    if nodes > 1:
        where, can = f"{nodes} hosts ({NODES_KEY})", f"{usable} can be used on each{limit}"
        cpu = f", or raise {NODES_KEY}{cpu}"
    else:
        where, can = "one node", f"{usable} can be used on this one{limit}"
    beside = f" and the {counted(together - 1, 'rank')} on its host" if together > 1 else ""
    return ConfigError(
        f"The processes need {counted(sum(wanted.values()), 'GPU')} of {where} ({parts}), and {can}: not enough are left for "
        f"{missing.name}{beside}. {_remedy(missing, config)}{cpu}."
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
