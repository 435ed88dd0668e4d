"""One run from a checked configuration to the written checkpoint: starts the parts, wires them, trains, and takes everything down."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rl_app_ppo.config import flat_settings, to_yaml
from rl_app_ppo.console import LossNotes, Screen
from rl_app_ppo.demo.store import read_facts
from rl_app_ppo.model_path import given_model
from rl_app_ppo.outputs import UNPUBLISHED, JSONLSink, kept_metrics, publish_folder
from rl_app_ppo.profiling import Profiling
from rl_app_ppo.recorder import Recorder, RunFiles
from rl_app_ppo.resume import Start
from rl_app_ppo.runtime.cluster import RayWorker, ray_session, write_timeline
from rl_app_ppo.runtime.messages import BuildCall, Role
from rl_app_ppo.runtime.placement import require_cpus
from rl_app_ppo.runtime.watch import named_losses, ray_servers
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.sinks import CONSOLE, RunFacts, logger_names, open_sinks
from rl_app_ppo.startup import Startup
from rl_app_ppo.symptoms import RewardFailures, Symptoms
from rl_app_ppo.wiring.data import about_validation, open_data, train_order
from rl_app_ppo.wiring.replicas import Replica, ReplicaSync
from rl_app_ppo.wiring.weights import RemoteSender, make_sync, measured
from rl_ckpt_engine import PluginPolicy
from rl_protocol.ports import DataPlane, MetricSink
from rl_protocol.temporary import temporary_folder
from rl_trainer import (
    PPOTrainer,
    StepGraph,
    TrainerParts,
    Workers,
    needs_critic,
    needs_reference,
)
from rl_trainer.agents import ToolAgent
from rl_trainer.checkpoints.writer import CheckpointWriter
from rl_trainer.data.split import Measured
from rl_trainer.hooks import Hook, named_hooks
from rl_trainer.sessions import SESSIONS
from rl_transferqueue import LocalPlane, connect, start_local_plane


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run is started with.

    Attributes:
        config: checked.
        graph: of its steps, from `preflight`.
        files: where it writes.
        start: from the beginning, or from a checkpoint.
        plugins: which plug-ins of the weight synchronisation the operator allows.
    """

    config: AppConfig
    graph: StepGraph
    files: RunFiles
    start: Start
    plugins: PluginPolicy


async def run(plan: RunPlan, screen: Screen, startup: Startup) -> Recorder:
    """Train as planned.

    Args:
        plan: what to do.
        screen: where progress is shown.
        startup: times the phases until the first step.

    Raises:
        RLError: whatever went wrong; processes are down and files closed by then.
    """
    config, files = plan.config, plan.files
    async with AsyncExitStack() as stack:
        stack.enter_context(screen)
        sinks: list[MetricSink] = []
        loggers = logger_names(config.trainer.logger)
        symptoms = Symptoms(screen.note, tools=_has_tools(config), reward_log=files.logs / "reward.log")
        recorder = Recorder(
            screen, sinks, config.trainer.total_training_steps, symptoms, startup, lines=CONSOLE in loggers
        )
        with startup.phase("data_plane", "starting the data plane"):
            plane_process = await stack.enter_async_context(_local_plane(config, files.logs, screen))
        with startup.phase("ray", "starting Ray"):
            await stack.enter_async_context(ray_session(config.ray, config.trainer))
            stack.enter_context(named_losses(_plane_servers(plane_process) | ray_servers()))
            await require_cpus(
                sum(computing(role, config) for role in _roles(config).values()), config.ray.cpus_per_worker
            )
        processes = _start_processes(_roles(config), config, files.logs)
        stack.callback(_kill, processes)
        workers = _workers(processes, config)
        store = stack.enter_context(temporary_folder("rl-app-ppo-"))
        model_path = await _load(plan, processes, plane_process, store, screen, startup)
        plane = await connect(plane_process.descriptor)
        stack.push_async_callback(plane.close)
        checkpoint = plan.start.checkpoint
        after = checkpoint.manifest.step if checkpoint else None
        for line in kept_metrics(files.metrics, -1 if after is None else after):
            recorder.remember(int(line["step"]), line)
        facts = RunFacts(folder=files.folder, config=flat_settings(to_yaml(config)), after=after)
        with startup.phase("data", "opening data and loggers"):
            for sink in (JSONLSink(files.metrics), *open_sinks(loggers, facts)):
                sinks.append(sink)
                stack.callback(sink.close)
            data = open_data(config, model_path)
        if about := about_validation(config, data):
            screen.note(about)
        parts = _parts(plan, data, plane, processes, workers, recorder, screen)
        own = _own_hooks(plan, processes, symptoms, stack)
        trainer = PPOTrainer(replace(parts, hooks={**parts.hooks, **own}))
        try:
            if checkpoint is not None:
                with startup.phase("resume", "loading the checkpoint"):
                    await trainer.resume(checkpoint)
            startup.done()
            startup.begin(
                "first validation" if config.trainer.val_before_train and checkpoint is None else "first step"
            )
            await trainer.fit()
        finally:
            startup.end()
            recorder.write_curve(files.curve)
        temporary = files.folder / UNPUBLISHED
        await trainer.save(temporary)
        publish_folder(temporary, files.checkpoint)
    return recorder


def _parts(
    plan: RunPlan,
    data: Mapping[str, Measured],
    plane: DataPlane,
    processes: Mapping[str, RayWorker],
    workers: Workers,
    recorder: Recorder,
    screen: Screen,
) -> TrainerParts:
    config = plan.config
    manager, on_step = None, recorder.on_step
    if config.checkpoint_engine.enabled:
        sender = RemoteSender(workers.actor)
        manager = make_sync(config.checkpoint_engine, plan.plugins, sender, workers.rollout, screen.weights)
        on_step = measured(manager, sender, recorder.on_step)
    replicas = [Replica(process, manager) for process in processes.values() if process.role == "rollout"]
    workers = replace(workers, rollout=replicas)
    return TrainerParts(
        graph=plan.graph,
        plane=plane,
        workers=workers,
        weight_sync=ReplicaSync(manager, replicas) if manager else None,
        train_order=train_order(config, data["train"]),
        validation_size=len(data["val"]) if "val" in data else 0,
        rollout=config.rollout,
        actor=config.actor,
        critic=config.critic,
        filter_groups=config.algorithm.filter_groups,
        loop=config.trainer,
        on_step=on_step,
        checkpoints=CheckpointWriter(
            plan.files.checkpoints,
            config=to_yaml(config),
            keep=config.trainer.max_ckpt_to_keep,
            workers=workers,
            timeout_s=config.trainer.stage_timeout_s,
        ),
        hooks={**named_hooks(config.trainer.hooks), "the console": LossNotes(screen)},
    )


def _own_hooks(
    plan: RunPlan, processes: Mapping[str, RayWorker], symptoms: Symptoms, stack: AsyncExitStack
) -> dict[str, Hook]:
    """Hooks of the app itself, by what switches them on."""
    hooks: dict[str, Hook] = {"reward failures": RewardFailures(symptoms)}
    if plan.config.trainer.profile_steps:
        models = [process for process in processes.values() if process.role != "reward"]
        profiling = Profiling(plan.files.profile, plan.config.trainer.profiled(), models, write_timeline)
        stack.push_async_callback(profiling.close)
        hooks["trainer.profile_steps"] = profiling
    return hooks


@asynccontextmanager
async def _local_plane(config: AppConfig, logs: Path, screen: Screen) -> AsyncGenerator[LocalPlane]:
    plane = await asyncio.to_thread(start_local_plane, config.transfer_queue, log_dir=logs)
    if control := plane.descriptor.controller.control:
        screen.note(f"data plane: listens at {control}")
    try:
        yield plane
    finally:
        await asyncio.to_thread(plane.close)


def _plane_servers(plane: LocalPlane) -> dict[int, str]:
    """Process id -> what it is; the controller is the first, and a plane in this process has none of its own."""
    controller, *units = plane.pids
    names = {controller: "The controller of the data plane"}
    names |= {pid: f"Storage unit {i} of the data plane" for i, pid in enumerate(units)}
    return {pid: name for pid, name in names.items() if pid != os.getpid()}


def _roles(config: AppConfig) -> dict[str, Role]:
    """Name of each process -> its role. The ranks of a role are in order; the first has the role's name."""
    trained: list[Role] = ["actor"]  # first: it makes the demo model while the others start
    if _has_reference(config):
        trained.append("ref")
    if needs_critic(config.algorithm):
        trained.append("critic")
    roles: dict[str, Role] = {
        role if rank == 0 else f"{role}-{rank}": role for role in trained for rank in range(config.ranks)
    }
    roles |= {f"rollout-{i}": "rollout" for i in range(config.rollout.num_workers)}
    roles["reward"] = "reward"
    return roles


def _has_tools(config: AppConfig) -> bool:
    """Whether sessions offer tools; of a session that is no ToolAgent it is not known."""
    run = SESSIONS.get(config.rollout.session).run
    return isinstance(getattr(run, "__self__", None), ToolAgent)


def _has_reference(config: AppConfig) -> bool:
    """Whether the reference policy has processes of its own; with LoRA it is the actor without its adapter."""
    return needs_reference(config.algorithm, config.actor) and not config.lora.rank


def _start_processes(roles: Mapping[str, Role], config: AppConfig, logs: Path) -> dict[str, RayWorker]:
    threads, cpus = config.trainer.threads_per_worker, config.ray.cpus_per_worker
    return {
        name: RayWorker(role, name, logs / f"{name}.log", threads, cpus * computing(role, config))
        for name, role in roles.items()
    }


def computing(role: Role, config: AppConfig) -> int:
    """Processes that compute for a worker: itself, or those of its vLLM engine, which share every layer."""
    return config.rollout.tensor_model_parallel_size if role == "rollout" else 1


def _workers(processes: Mapping[str, RayWorker], config: AppConfig) -> Workers:
    by_role: dict[Role, list[RayWorker]] = {"ref": [], "critic": []}
    for process in processes.values():
        by_role.setdefault(process.role, []).append(process)
    colocated = needs_reference(config.algorithm, config.actor) and not by_role["ref"]
    return Workers(
        rollout=by_role["rollout"],
        reward=processes["reward"],
        actor=by_role["actor"],
        replicas=config.replicas,
        ref=by_role["actor"] if colocated else by_role["ref"],
        critic=by_role["critic"],
    )


def _kill(processes: Mapping[str, RayWorker]) -> None:
    for process in processes.values():
        process.kill()


async def _load(
    plan: RunPlan,
    processes: Mapping[str, RayWorker],
    plane: LocalPlane,
    store: Path,
    screen: Screen,
    startup: Startup,
) -> Path:
    """Wait for the processes, and have them load their models; returns the folder of the policy that they start from.

    The ranks of a role meet through a file in `store`, which they use until the run ends.
    """
    config = plan.config
    model_path = given_model(config)
    if model_path is None:
        with startup.phase("base_model", "making or finding the demo's base model"):
            model_path = await _demo_model(config, processes["actor"], screen, startup)
    with startup.phase("workers", f"starting {len(processes)} worker processes"):
        await asyncio.gather(*(process.ready(config.ray.start_timeout_s) for process in processes.values()))
    with startup.phase("models", "workers load their models"):
        await _build(plan, _workers(processes, config), model_path, plane, store)
    return model_path


async def _demo_model(config: AppConfig, actor: RayWorker, screen: Screen, startup: Startup) -> Path:
    start, path, worked = time.perf_counter(), "", False
    async for progress in actor.warm_up(to_yaml(config)):
        if progress.path:
            path = progress.path
            continue
        worked = True
        startup.describe(f"warm-up of the demo's base model, step {progress.step} of at most {progress.total}")
        screen.bar("warm-up", progress.step, progress.total)
    screen.clear_bar()
    how = (
        f"supervised warm-up took {time.perf_counter() - start:.0f} s with the start of the workers"
        if worked
        else "from the cache, no warm-up"
    )
    accuracy = read_facts(Path(path))["accuracy"]
    screen.note(f"base model: {how}; accuracy {accuracy:.3f} ({path})")
    return Path(path)


async def _build(plan: RunPlan, workers: Workers, model_path: Path, plane: LocalPlane, store: Path) -> None:
    """Have all processes load what they need; the ranks of a role meet through a file in `store`."""
    config = plan.config
    resolved, described = to_yaml(config), msgspec.json.encode(plane.descriptor)
    groups = [workers.actor, workers.critic, [workers.reward], *([w] for w in workers.rollout)]
    groups += [workers.ref] if _has_reference(config) else []
    calls: list[Awaitable[bytes]] = []
    for ranks in groups:
        for rank, worker in enumerate(ranks):
            call = BuildCall(
                config=resolved,
                model_path=str(model_path),
                plane=described,
                rank=rank,
                store=str(store / ranks[0].name),
                samples=str(plan.files.samples),
                plugins=plan.plugins,
            )
            calls.append(worker.call("build", msgspec.msgpack.encode(call), timeout_s=config.ray.start_timeout_s))
    await asyncio.gather(*calls)
