"""What a run would start, with its memory by estimate (`--plan`). Imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import torch

from rl_app_ppo.checks.machine import check_installed_engines, gpu_count, gpu_memory
from rl_app_ppo.checks.memory import check_plane_size, step_bytes
from rl_app_ppo.checks.model_size import ModelSize, model_size
from rl_app_ppo.config.devices import idle_gpus, plan_processes
from rl_app_ppo.config.model_path import described_model, described_reference
from rl_app_ppo.config.placement import Role, shares_base, shares_weights
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.settings import ModelSettings
from rl_rollout_vllm import CPU_KV_CACHE
from rl_trainer import build_graph
from rl_trainer.config import ActorConfig, CriticConfig
from rl_trainer.config.backends import FsdpConfig, MegatronConfig
from rl_trainer.config.lora import LoraConfig


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Equal processes of a run.

    Attributes:
        count: how many there are.
        host: their host, from 1.
        roles: of each.
        gpus: of each.
        cpus: that Ray reserves for each.
        memory: bytes of each by role and part, by estimate.
    """

    count: int
    host: int
    roles: tuple[str, ...]
    gpus: int
    cpus: float
    memory: dict[str, dict[str, int]]

    @property
    def bytes(self) -> int:
        """All memory of each."""
        return sum(sum(parts.values()) for parts in self.memory.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would start.

    Attributes:
        weights: of the model.
        trained: those of them, or of its adapters, that an actor trains.
        gpus: of all processes.
        hosts: of the run.
        processes: that compute.
        gpu_memory: bytes of the smallest GPU of this machine, if a process uses one; 0: none.
        data_plane_bytes: host memory of the rows of a step, at most.
        warning: GPUs that stand idle; empty: none do.
    """

    weights: int
    trained: int
    gpus: int
    hosts: int
    processes: tuple[ProcessPlan, ...]
    gpu_memory: int
    data_plane_bytes: int
    warning: str


def make_plan(config: AppConfig) -> Plan:
    """The processes of a run: their roles, devices, CPUs, and memory by estimate.

    With trainer.n_gpus_per_node above 0 it supposes so many GPUs and the packages for them, else
    those of this machine. Of the model it needs config.json alone.

    Raises:
        ConfigError: the model can't be planned, there are too few GPUs, or the data plane is too
            small for a step.
    """
    gpus = config.trainer.n_gpus_per_node
    if gpus <= 0:
        check_installed_engines(config)
    there = gpus if gpus > 0 else gpu_count()
    planned = plan_processes(config, there)
    size = model_size(described_model(config), config.lora)
    teacher = described_reference(config)
    sizes: dict[Role, ModelSize] = {} if teacher is None else {"ref": model_size(teacher, LoraConfig())}
    return Plan(
        weights=size.weights,
        trained=size.trained,
        gpus=sum(process.gpus for process in planned),
        hosts=config.trainer.nnodes,
        processes=tuple(
            ProcessPlan(
                count=count,
                host=host + 1,
                roles=roles,
                gpus=gpus,
                cpus=config.ray.cpus_per_worker,
                memory={role: dict(role_bytes(role, config, sizes.get(role, size), on_gpu=gpus > 0)) for role in roles},
            )
            for (host, roles, gpus), count in Counter((p.host, p.roles, p.gpus) for p in planned).items()
        ),
        gpu_memory=gpu_memory() if any(process.gpus for process in planned) else 0,
        data_plane_bytes=_plane_bytes(config),
        warning=idle_gpus(config, planned, there),
    )


def plan_text(plan: Plan) -> str:
    """The plan for people."""
    lines = [
        f"model: {plan.weights:,} weights, {plan.trained:,} of an actor trained; GPUs: {plan.gpus}",
        "most memory of each process by estimate, without logits, images, the CUDA context and what libraries hold:",
    ]
    for process in plan.processes:
        host = f"host {process.host}: " if plan.hosts > 1 else ""
        device = f"{process.gpus} GPU{'s' if process.gpus > 1 else ''}" if process.gpus else "CPU"
        lines.append(
            f"{host}{f'{process.count} x ' if process.count > 1 else ''}{'+'.join(process.roles)}: {device}, "
            f"{process.cpus:g} CPUs reserved, {shown_bytes(process.bytes)}"
        )
        lines += [
            f"  {role}: "
            + (", ".join(f"{name} {shown_bytes(n)}" for name, n in parts.items()) or "no model of its own")
            for role, parts in process.memory.items()
        ]
    plane = f"data plane: at most {shown_bytes(plan.data_plane_bytes)} for a step, without validation, in host memory"
    if plan.gpus:
        here = f"{shown_bytes(plan.gpu_memory)} here" if plan.gpu_memory else "no GPU here, the estimate alone"
        lines.append(f"memory of each GPU: {here}")
    return "\n".join([*lines, plane, *filter(None, [plan.warning])]) + "\n"


def _plane_bytes(config: AppConfig) -> int:
    """The data plane's memory of a step whose prompts are as long as allowed."""
    longest = config.data.max_prompt_length if config.data.train_files else ModelSettings().context
    needed = step_bytes(config, build_graph(config.algorithm, config.actor), longest, 0)
    check_plane_size(config, needed)
    return needed


def role_bytes(role: Role, config: AppConfig, size: ModelSize, *, on_gpu: bool = False) -> Mapping[str, int]:
    """Part of the memory -> bytes in each process of a role, without a reward model's."""
    match role:
        case "actor":
            return _trained(config, config.actor, size, size.trained)
        case "critic":
            return _trained(config, config.critic, size, size.weights)
        case "ref":
            return {"weights": _weights(config, size, 0)}
        case "rollout":
            return _generates(config, size, on_gpu=on_gpu)
        case "reward":
            return {}


def _trained(config: AppConfig, options: ActorConfig | CriticConfig, size: ModelSize, trained: int) -> dict[str, int]:
    """Weights, their float32 gradients, AdamW's two moments, and the activations of a pass."""
    part, adapters = _shards(config), 0 if trained == size.weights else 4 * trained
    engine = config.engine
    dtype = torch.bfloat16 if engine.computes_in == "bfloat16" else torch.float32
    tokens, rows = options.ppo_max_token_len, options.ppo_micro_batch_size
    if not tokens:
        tokens = (rows or -(-options.ppo_mini_batch_size * config.rollout.n // len(set(config.replicas)))) * _longest(
            config
        )
    activations = size.activations(tokens, dtype)
    if isinstance(engine, FsdpConfig) and engine.activation_checkpointing:
        activations = activations // size.layers + size.layers * size.hidden * tokens * dtype.itemsize
    if isinstance(engine, MegatronConfig):
        activations //= engine.replica_size
    return {
        "weights": _weights(config, size, trained) + adapters // part,
        "gradients": 4 * trained // part,
        "optimizer": 8 * trained // part,
        "activations": activations,
    }


def _weights(config: AppConfig, size: ModelSize, trained: int) -> int:
    """Float32 weights of a rank, and a bfloat16 copy where it computes in one.

    Megatron-Core has float32 weights beside those in bfloat16 only where they are trained.
    """
    copied = config.engine.computes_in == "bfloat16" and not isinstance(config.engine, FsdpConfig)
    if copied and isinstance(config.engine, MegatronConfig) and trained < size.weights:
        return 2 * size.weights // _shards(config)
    return (4 + 2 * copied) * size.weights // _shards(config)


def _shards(config: AppConfig) -> int:
    """Ranks over which the weights of a model are divided."""
    engine = config.engine
    return engine.replica_size if isinstance(engine, MegatronConfig) else engine.ranks


def _generates(config: AppConfig, size: ModelSize, *, on_gpu: bool) -> dict[str, int]:
    """Weights and cache of a replica, over all of its tensor-parallel processes."""
    rollout, element = config.rollout, 2 if config.rollout.dtype == "bfloat16" else 4
    tokens = min(rollout.max_batch_size, config.data.train_batch_size * rollout.n) * _longest(config)
    shared = shares_base(config) or (shares_weights(config) and not on_gpu)
    own = {} if shared else {"weights": element * size.weights}
    if rollout.name != "vllm":
        return own | {"KV cache": element * size.kv_token * tokens}
    cache = rollout.kv_cache_mb << 20 or (0 if on_gpu else CPU_KV_CACHE)  # a GPU's is what weights leave
    return own | ({"KV cache": cache} if cache else {})


def _longest(config: AppConfig) -> int:
    """Most tokens of a prompt and its response."""
    if not config.data.train_files:
        return ModelSettings().context
    return config.data.max_prompt_length + config.rollout.response_length


def shown_bytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
