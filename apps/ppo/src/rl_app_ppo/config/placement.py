"""The option `placement`: which roles share a process, and so a device and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rl_app_ppo.config.rollout_engines import ROLLOUT_ENGINES
from rl_protocol import ConfigError
from rl_protocol.support.options import items
from rl_trainer import RolloutConfig, needs_critic

if TYPE_CHECKING:
    from rl_app_ppo.config.schema import AppConfig

Role = Literal["actor", "ref", "critic", "rollout", "reward"]
ROLES: tuple[Role, ...] = get_args(Role)
AUTO = "auto"
"""Value of `placement` that `resolved_placement` replaces."""
NAMED = {"separate": "", "fused": "actor+ref+rollout+critic"}
"""Value of `placement` -> the groups that it stands for."""
IN_PROCESS = "naive"
"""Weight engine of an actor and a rollout in one process."""
ACROSS_HOSTS = "tcp"
"""Weight engine that reaches all hosts."""
MODELS = "actor+ref+critic"
"""The group of all trained models."""
SHARE_GPUS, TENSOR_PARALLEL = "rollout.share_gpus", "rollout.tensor_model_parallel_size"
_SHARED_PART = 0.5
"""Default of rollout.gpu_memory_utilization beside models that are trained, as in verl."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Roles that share each of `ranks` processes; a rollout alone has replicas instead of ranks.

    There is one reward worker, in the first process of its group.
    """

    roles: tuple[Role, ...]
    ranks: int

    def roles_of(self, rank: int) -> tuple[Role, ...]:
        """The roles of a process."""
        return tuple(role for role in self.roles if role != "reward" or rank == 0)

    def process_name(self, rank: int) -> str:
        """Name of a process, and of its log."""
        return self._numbered("_".join(self.roles_of(rank)), rank)

    def role_name(self, role: Role, rank: int) -> str:
        """Name of a role's worker in a process."""
        return self._numbered(role, rank)

    def _numbered(self, name: str, rank: int) -> str:
        return name if rank == 0 and self.roles != ("rollout",) else f"{name}-{rank}"


def resolved_placement(chosen: Mapping[str, object], ranks: int) -> tuple[tuple[str, ...], str]:
    """The placement that the options of a run ask for, and why.

    By default the models of a rank share its process, and so does a rollout, unless that takes more
    replicas than without: each holds a copy of the weights, which replicas of their own share.

    Args:
        chosen: dotted key -> value of everything that presets and the user set.
        ranks: processes that share the actor.
    """
    given = tuple(map(str, items(chosen.get("placement", AUTO))))
    if given != (AUTO,):
        return given, f"default of placement={','.join(given)}"
    if not ROLLOUT_ENGINES.get(str(chosen.get("rollout.name", "hf"))).shares_process:
        if chosen.get(SHARE_GPUS):
            return (MODELS,), f"placement={AUTO} with {SHARE_GPUS}=true"
        return ("separate",), f"placement={AUTO} with rollout.name={chosen['rollout.name']}"
    one_process = {
        "rollout.num_workers": ranks,
        "checkpoint_engine.backend": IN_PROCESS,
        "async_rl.max_staleness": 0,
    }
    for key, needed in one_process.items():
        if chosen.get(key, needed) != needed:
            return ("separate",), f"placement={AUTO} with {key}={chosen[key]}"
    why = f"placement={AUTO} with {'one actor rank' if ranks == 1 else f'{ranks} actor ranks'}"
    if "rollout.num_workers" not in chosen and ranks > RolloutConfig().num_workers:
        return (MODELS,), f"{why}, more than rollout replicas"
    return ("fused",), f"{why} and rollout.name={chosen.get('rollout.name', 'hf')}"


def parse_placement(placement: Sequence[str]) -> tuple[tuple[Role, ...], ...]:
    """The groups of several roles that `placement` names.

    >>> parse_placement(["actor+ref", "critic+reward"])
    (('actor', 'ref'), ('critic', 'reward'))

    Raises:
        ConfigError: an unknown role, or one that is in two groups.
    """
    text = ",".join(NAMED.get(name, name) for name in placement).replace(" ", "")
    groups = [group.split("+") for group in text.split(",") if group]
    named = [role for group in groups for role in group]
    for role in named:
        if role not in ROLES:
            raise ConfigError(
                f"placement must be {AUTO}, {', '.join(NAMED)}, or groups of roles such as actor+ref+rollout,critic; "
                f"got {','.join(placement)!r}, and {role!r} is none of {', '.join(ROLES)}."
            )
        if named.count(role) > 1:
            raise ConfigError(
                f"placement must name each role once; got {','.join(placement)!r}, which names {role} twice."
            )
    return tuple(tuple(role for role in ROLES if role in group) for group in groups)


def rollout_in_actor(placement: Sequence[str]) -> bool:
    """Whether the rollout is in the process of the actor."""
    return any({"actor", "rollout"} <= set(group) for group in parse_placement(placement))


def shares_weights(config: AppConfig) -> bool:
    """Whether the rollout generates from the actor's own weights; without a copy on the CPU.

    Ranks that share the weights gather a copy of them for each rollout.
    """
    copied = config.lora.rank or config.rollout.dtype != "float32" or not config.checkpoint_engine.enabled
    lent = config.ranks == 1 and config.backend.lends_weights
    return rollout_in_actor(config.placement) and lent and not copied


def shares_base(config: AppConfig) -> bool:
    """Whether the rollout merges adapters into the actor's own base weights, without a copy.

    The merged weights are the rollout's own: the policy computes with adapters beside the base,
    which rounds differently, and subtracting an adapter does not restore the base bit by bit. A
    base that was rounded to bfloat16 is not that of a rollout in float32.
    """
    one_device = config.rollout.device == config.engine.trains_on
    exact = config.engine.computes_in == "float32" or config.rollout.dtype == "bfloat16"
    lends = config.backend.lends_base and config.generator.shares_base and one_device and exact
    return rollout_in_actor(config.placement) and config.sends_adapters and lends


def critic_shares_base(config: AppConfig) -> bool:
    """Whether the critic's adapters change the actor's own base weights, without a copy."""
    together = any({"actor", "critic"} <= set(group) for group in parse_placement(config.placement))
    adapters = config.critic.use_lora and config.lora.rank > 0
    return together and adapters and config.backend.lends_base


def worker_groups(config: AppConfig) -> tuple[WorkerGroup, ...]:
    """The worker groups of a run; that of the actor is the first."""
    used: list[Role] = [role for role in ROLES if _used(role, config)]
    given: list[tuple[Role, ...]] = [
        tuple(role for role in group if role in used) for group in parse_placement(config.placement)
    ]
    shared = {role for group in given for role in group}
    alone: list[tuple[Role, ...]] = [(role,) for role in used if role not in shared]
    groups = [*filter(None, given), *alone]
    groups.sort(key=lambda group: ROLES.index(group[0]))
    return tuple(WorkerGroup(group, _ranks(group, config)) for group in groups)


def described_groups(config: AppConfig) -> str:
    """The processes of a run, and how its rollout gets the weights."""
    groups = worker_groups(config)
    first, *others = [(_described(group), group.ranks) for group in groups]
    named = [
        f"{first[0]} in {first[1]} process{'es' if first[1] > 1 else ''}",
        *(f"{name} in {n}" for name, n in others),
    ]
    if not config.checkpoint_engine.enabled:
        weights = "keeps the initial weights"
    elif shares_weights(config):
        weights = "computes with the actor's own weights (on a GPU: with a copy)"
    elif rollout_in_actor(config.placement):
        weights = f"gets a copy of the {'adapters' if config.sends_adapters else 'weights'} in its process"
    else:
        weights = f"gets the weights through {config.checkpoint_engine.backend}"
    return f"{', '.join(named)}; rollout {weights}"


def _described(group: WorkerGroup) -> str:
    once = group.ranks > 1 and len(group.roles) > 1 and "reward" in group.roles
    return "+".join(group.roles) + (" (reward in the first)" if once else "")


def placement_defaults(placement: Sequence[str], ranks: int) -> dict[str, object]:
    """Values of other keys that a placement needs; `ranks` processes share the actor."""
    if not rollout_in_actor(placement):
        return {}
    return {"rollout.num_workers": ranks, "checkpoint_engine.backend": IN_PROCESS}


def host_defaults(chosen: Mapping[str, object], placement: Sequence[str]) -> dict[str, object]:
    """Values of other keys that several hosts need: a weight engine that reaches all of them."""
    nodes = chosen.get("trainer.nnodes", 1)
    several = isinstance(nodes, int) and nodes > 1 and not rollout_in_actor(placement)
    return {"checkpoint_engine.backend": ACROSS_HOSTS} if several else {}


def shared_gpu_defaults(chosen: Mapping[str, object], ranks: int) -> dict[str, object]:
    """Values of other keys that `rollout.share_gpus` needs; see `resolved_placement`."""
    size = chosen.get(TENSOR_PARALLEL, 1)
    if not chosen.get(SHARE_GPUS) or not isinstance(size, int):
        return {}
    return {
        "rollout.free_cache_engine": True,
        "rollout.gpu_memory_utilization": _SHARED_PART,
        "rollout.num_workers": max(1, ranks // max(1, size)),
    }


def check_placement(config: AppConfig) -> None:
    """Check that the engines work with the placement.

    Raises:
        ConfigError: one does not; names the key to change.
    """
    for group in worker_groups(config):
        if len(group.roles) > 1:
            _check_group(group, config)
    if bound := config.async_rl.max_staleness:
        _check_beside(bound, config)
    if config.rollout.share_gpus:
        _check_shared_gpus(config)
    if config.rollout.free_cache_engine and not config.checkpoint_engine.enabled:
        raise ConfigError(
            "rollout.free_cache_engine=true works through the weight manager; set checkpoint_engine.enabled=true, or rollout.free_cache_engine=false."
        )


def _check_beside(bound: int, config: AppConfig) -> None:
    """Check that generation can run beside training."""
    setting = f"async_rl.max_staleness={bound} generates while the models train"
    for group in worker_groups(config):
        if "rollout" in group.roles and len(group.roles) > 1:
            raise ConfigError(
                f"{setting}, but placement={','.join(config.placement)} puts {' and '.join(group.roles)} into one process, which does one at a time; "
                "set placement=separate, or async_rl.max_staleness=0."
            )
    if config.rollout.free_cache_engine:
        raise ConfigError(
            f"{setting}, so replicas can't free their memory meanwhile; set rollout.free_cache_engine=false, or async_rl.max_staleness=0."
        )
    if not config.checkpoint_engine.enabled:
        raise ConfigError(
            f"{setting}, and bounds how old the weights of the rollout get; set checkpoint_engine.enabled=true, or async_rl.max_staleness=0."
        )


def syncs_by_nccl(config: AppConfig) -> bool:
    """Whether NCCL carries the weights, alone or as changes (`delta-nccl`)."""
    return config.checkpoint_engine.backend.endswith("nccl")


def _check_shared_gpus(config: AppConfig) -> None:
    """Check that replicas can have the GPUs of the actor's ranks, and give their memory back."""
    rollout = config.rollout
    if config.engine.trains_on == "cpu":
        raise ConfigError(
            f"{SHARE_GPUS}=true shares the GPUs of the actor, which trains on the CPU ({config.model_engine}.device=cpu). Change one of them."
        )
    if not rollout.free_cache_engine:
        raise ConfigError(
            f"{SHARE_GPUS}=true needs rollout.free_cache_engine=true, so that replicas give their memory back during updates; got false."
        )
    if syncs_by_nccl(config):
        raise ConfigError(
            f"{SHARE_GPUS}=true puts the actor and a replica on one GPU, which NCCL refuses in one group; set checkpoint_engine.backend=shm, "
            f"or {ACROSS_HOSTS} on several hosts; got {config.checkpoint_engine.backend}."
        )
    if rollout.num_workers * rollout.tensor_model_parallel_size != config.ranks:
        raise ConfigError(
            f"{SHARE_GPUS}=true gives each replica the GPUs of rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} of the "
            f"{config.ranks} ranks of the actor, and each rank lends its GPU once: rollout.num_workers={rollout.num_workers} does not fit. Set "
            f"both so that their product is {config.ranks}."
        )


def _check_group(group: WorkerGroup, config: AppConfig) -> None:
    shared = f"placement={','.join(config.placement)} puts {' and '.join(group.roles)} into one process"
    wanted: dict[str, tuple[object, object]] = {}
    if "rollout" in group.roles:
        if not config.generator.shares_process:
            raise ConfigError(
                f"{shared}, but rollout.name={config.rollout.name} needs its worker's process alone. Set "
                f"rollout.name=hf, or a placement that leaves the rollout out, such as {MODELS}."
            )
        wanted["rollout.num_workers"] = (config.rollout.num_workers, group.ranks)
    if {"actor", "rollout"} <= set(group.roles) and config.checkpoint_engine.enabled:
        wanted["checkpoint_engine.backend"] = (config.checkpoint_engine.backend, IN_PROCESS)
    for key, (got, need) in wanted.items():
        if got != need:
            raise ConfigError(f"{shared}, for which {key} must be {need}; got {got}. Change it, or the placement.")


def _used(role: Role, config: AppConfig) -> bool:
    match role:
        case "ref":  # with LoRA the reference is the actor without its adapter
            return config.loads_reference
        case "critic":
            return needs_critic(config.algorithm)
        case _:
            return True


def _ranks(roles: tuple[Role, ...], config: AppConfig) -> int:
    if roles == ("rollout",):
        return config.rollout.num_workers
    return config.ranks if set(roles) & {"actor", "ref", "critic"} else 1
