"""The processes that a run would start, with estimates of their memory (`rl plan`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.memory import shown_bytes
from rl_app_ppo.checks.registry import Finding, findings, planned_step_bytes
from rl_app_ppo.checks.role_memory import ModelSize, host_parts, role_bytes, sent_bytes
from rl_app_ppo.config.hosts import units_join
from rl_app_ppo.config.placement import Role
from rl_app_ppo.config.schema import AppConfig
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.counted import counted


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Equal processes of a run.

    Attributes:
        count: how many there are.
        host: their host, from 1.
        roles: of each.
        gpus: of each, of its own.
        shared_gpus: of each, which are those of the actor's ranks.
        cpus: that Ray reserves for each.
        memory: bytes of each by role and part, by estimate.
        host_memory: bytes of each in host memory, beside those of a GPU.
    """

    count: int
    host: int
    roles: tuple[str, ...]
    gpus: int
    shared_gpus: int = 0
    cpus: float
    memory: dict[str, dict[str, int]]
    host_memory: int = 0

    @property
    def bytes(self) -> int:
        """All memory of each."""
        return sum(sum(parts.values()) for parts in self.memory.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would start.

    Attributes:
        weights: of the model.
        vision: those of them in its vision tower; 0: the model reads text alone.
        trained: those of them, or of its adapters, that an actor trains.
        gpus: of all processes.
        hosts: of the run.
        processes: that compute.
        gpu_memory: bytes of the smallest GPU of this machine, if a process uses one; 0: none.
        data_plane_bytes: host memory of the rows of a step, at most.
        weight_sync_bytes: that a replica of the rollout receives after a step; 0: none are sent.
        storage_units: of the data plane, by number of their host; 0: the driver's, if no process of
            the run is there.
        checks: what the checks found.
    """

    weights: int
    vision: int
    trained: int
    gpus: int
    hosts: int
    processes: tuple[ProcessPlan, ...]
    gpu_memory: int
    data_plane_bytes: int
    weight_sync_bytes: int
    storage_units: dict[int, int]
    checks: tuple[Finding, ...]

    @property
    def refused(self) -> bool:
        """Whether no run of this plan starts."""
        return any(found.level == "error" for found in self.checks)


def make_plan(config: AppConfig, plugins: PluginPolicy) -> Plan:
    """The processes of a run: their roles, devices, CPUs, and memory by estimate.

    With trainer.n_gpus_per_node above 0 it supposes so many GPUs and the packages for them, else
    those of this machine. Of the model it needs config.json alone.

    Raises:
        ConfigError: the model can't be planned, a package is missing, there are too few GPUs, or
            the limit of the address space is too low.
    """
    gpus = config.trainer.n_gpus_per_node
    facts = Facts(config, plugins, gpus if gpus > 0 else None)
    checks = tuple(findings(facts, "plan"))
    for found in checks:
        if found.what in ("address space", "engines", "devices") and found.level == "error":
            raise ConfigError(found.text)
    sizes = facts.role_sizes  # imports torch, which the address space has room for
    size, images = sizes("actor"), facts.planned_image_tokens
    return Plan(
        weights=size.weights,
        vision=size.vision.weights if size.vision else 0,
        trained=size.trained,
        gpus=sum(process.gpus for process in facts.planned),
        hosts=config.trainer.nnodes,
        processes=tuple(
            _process_plan(facts, sizes, images, group, count)
            for group, count in Counter((p.host, p.roles, p.gpus, len(p.lenders)) for p in facts.planned).items()
        ),
        gpu_memory=facts.gpu_bytes,
        data_plane_bytes=planned_step_bytes(facts),
        weight_sync_bytes=sent_bytes(config, size),
        storage_units=_storage_units(config),
        checks=checks,
    )


def _process_plan(
    facts: Facts,
    sizes: Callable[[Role], ModelSize],
    images: int,
    group: tuple[int, tuple[Role, ...], int, int],
    count: int,
) -> ProcessPlan:
    """So many equal processes: their host, roles, GPUs and shared GPUs."""
    (host, roles, gpus, shared), config = group, facts.config
    on_gpu, memory, offloaded = gpus + shared > 0, dict[str, dict[str, int]](), 0
    for role in roles:
        parts = dict(role_bytes(role, config, sizes(role), image_tokens=images, on_gpu=on_gpu))
        if on_gpu:
            offloaded += sum(parts.pop(name, 0) for name in host_parts(role, config))
        memory[role] = parts
    return ProcessPlan(
        count=count,
        host=host + 1,
        roles=roles,
        gpus=gpus,
        shared_gpus=shared,
        cpus=config.ray.cpus_per_worker,
        memory=memory,
        host_memory=offloaded,
    )


def plan_text(plan: Plan) -> str:
    """The plan for people."""
    tower = f" ({plan.vision:,} of its vision tower)" if plan.vision else ""
    lines = [
        f"model: {plan.weights:,} weights{tower}, {plan.trained:,} of an actor trained; GPUs: {plan.gpus}",
        f"most memory of each process by estimate, without {'images of rollouts, ' if plan.vision else ''}the CUDA context and what libraries "
        "hold:",
    ]
    for process in plan.processes:
        host = f"host {process.host}: " if plan.hosts > 1 else ""
        gpus = process.gpus + process.shared_gpus
        device = f"{counted(gpus, 'GPU')}{' of the actor' if process.shared_gpus else ''}" if gpus else "CPU"
        lines.append(
            f"{host}{f'{process.count} x ' if process.count > 1 else ''}{'+'.join(process.roles)}: {device}, "
            f"{process.cpus:g} {'CPU' if process.cpus == 1 else 'CPUs'} reserved, {shown_bytes(process.bytes)}"
            + (f", and {shown_bytes(process.host_memory)} of host memory" if process.host_memory else "")
        )
        lines += [
            f"  {role}: "
            + (", ".join(f"{name} {shown_bytes(n)}" for name, n in parts.items()) or "no model of its own")
            for role, parts in process.memory.items()
        ]
    plane = (
        f"data plane: at most {shown_bytes(plan.data_plane_bytes)} for a step with one trajectory of each session, without validation, in "
        "host memory"
    )
    if plan.gpus:
        here = f"{shown_bytes(plan.gpu_memory)} here" if plan.gpu_memory else "no GPU here, the estimate alone"
        lines.append(f"memory of each GPU: {here}")
    if plan.hosts > 1:
        units = ", ".join(
            f"{units} on {f'host {host}' if host else 'that of the driver'}"
            for host, units in plan.storage_units.items()
        )
        plane += f"; storage units: {units}"
    wrong = [f"{found.level}: {found.text}" for found in plan.checks if found.level != "ok"]
    sync = f"weight sync: {shown_bytes(plan.weight_sync_bytes)} to each replica of the rollout after a step"
    sent = [sync] if plan.weight_sync_bytes else []
    return "\n".join([*lines, plane, *sent, *wrong]) + "\n"


def _storage_units(config: AppConfig) -> dict[int, int]:
    settings = config.transfer_queue
    hosts = range(1, config.trainer.nnodes + 1) if units_join(settings) else (0,)
    return dict.fromkeys(hosts, settings.num_storage_units)
