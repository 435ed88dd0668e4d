"""One run from a checked configuration to the written checkpoint: starts the parts, wires them, trains, and takes everything down."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from rl_app_ppo.config import flat_settings, to_yaml
from rl_app_ppo.console import Screen, step_line, validation_accuracy
from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.demo.store import read_facts
from rl_app_ppo.memory import available_bytes, check_memory, parameters
from rl_app_ppo.outputs import JSONLSink, draw_curve, kept_metrics, publish_folder, writing
from rl_app_ppo.resume import CHECKPOINTS, Start
from rl_app_ppo.rewards import check_rewards
from rl_app_ppo.runtime.cluster import RayWorker, ray_session
from rl_app_ppo.runtime.messages import BuildCall, Role
from rl_app_ppo.runtime.placement import require_cpus
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.sinks import CONSOLE, RunFacts, check_installed, logger_names, open_sinks
from rl_app_ppo.wiring.data import Prompts, open_data, train_order
from rl_app_ppo.wiring.weights import RemoteSender, check_sync, make_sync, measured
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.ports import DataPlane, MetricSink
from rl_rollout_vllm import require_vllm
from rl_trainer import (
    PPOTrainer,
    StepGraph,
    TrainerParts,
    Workers,
    build_graph,
    needs_critic,
    needs_reference,
)
from rl_trainer.checkpoints.writer import CheckpointWriter
from rl_trainer.hooks import named_hooks
from rl_transferqueue import LocalPlane, connect, start_local_plane

logger = logging.getLogger(__name__)


def preflight(config: AppConfig, plugins: PluginPolicy) -> StepGraph:
    """Everything that can be known to be wrong before a process starts.

    Args:
        config: of the run.
        plugins: which plug-ins of the weight synchronisation the operator allows.

    Raises:
        ConfigError: names the key.
        VLLMUnavailableError: rollout.name=vllm without vLLM.
    """
    graph = build_graph(config.algorithm, config.actor)
    check_rewards(config.reward)
    if config.rollout.name == "vllm":
        require_vllm()
    check_sync(config.checkpoint_engine, plugins)
    check_installed(logger_names(config.trainer.logger))
    named_hooks(config.trainer.hooks)
    path = _given_model(config)
    context = ModelSettings().context if path is None else _context(path)
    longest = max(rows.longest for rows in open_data(config, path).values())
    if path is not None and config.ray.address == "local":
        check_memory(parameters(path), config, available_bytes())
    if longest + config.rollout.response_length > context:
        raise ConfigError(
            f"rollout.response_length={config.rollout.response_length} and the longest prompt of {longest} tokens do not fit the model's "
            f"context of {context}; set rollout.response_length to at most {context - longest}."
        )
    for key, most in (("actor", config.actor.ppo_max_token_len), ("critic", config.critic.ppo_max_token_len)):
        if most and longest + config.rollout.response_length > most:
            raise ConfigError(
                f"{key}.ppo_max_token_len must hold the longest prompt of {longest} tokens and rollout.response_length="
                f"{config.rollout.response_length}; got {most}."
            )
    return graph


def _given_model(config: AppConfig) -> Path | None:
    return Path(config.model.path).expanduser() if config.model.path else None


def _context(path: Path) -> int:
    """Most tokens the model at `path` can see, after a look at whether it can be loaded at all."""
    advice = "Give a folder written by save_pretrained, or leave model.path empty for the demo model."
    try:
        context: object = json.loads((path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path={str(path)!r} is no readable Hugging Face checkpoint folder: config.json: {error}. {advice}"
        ) from error
    if not isinstance(context, int):
        raise ConfigError(f"model.path={str(path)!r}: config.json names no max_position_embeddings. {advice}")
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"model.path={str(path)!r} holds no *.safetensors file. {advice}")
    return context


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Paths of one run, all below its folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.folder / "curve.png"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


class Recorder:
    """Takes the metrics of each step to the sinks and the screen, and keeps the curves."""

    def __init__(self, screen: Screen, sinks: list[MetricSink], total: int, *, lines: bool = True) -> None:
        self._screen = screen
        self._lines = lines
        self._sinks = sinks
        self._total = total
        self.reward: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; step 0 is the validation before training."""
        accuracy = self.remember(step, metrics)
        for sink in self._sinks:
            sink.log(step, metrics)
        if step and self._lines:
            self._screen.note(step_line(step, self._total, metrics))
        elif accuracy is not None and self._lines:
            self._screen.note(f"before training: validation accuracy {accuracy:.3f}")
        self._screen.bar("training", step, self._total)

    def remember(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Add one step to the curves; returns its validation accuracy, if it has one."""
        accuracy = validation_accuracy(metrics)
        if accuracy is not None:
            self.validation.append((step, accuracy))
        if "critic/acc/mean" in metrics:
            self.reward.append((step, metrics["critic/acc/mean"]))
        return accuracy

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        return {"validation accuracy": self.validation, "training accuracy": self.reward}


async def run(config: AppConfig, files: RunFiles, screen: Screen, start: Start, plugins: PluginPolicy) -> Recorder:
    """Train as configured, from the beginning or from a checkpoint; see `preflight` for `plugins`.

    Raises:
        RLError: whatever went wrong; processes are down and files closed by then.
    """
    graph = preflight(config, plugins)
    async with AsyncExitStack() as stack:
        stack.enter_context(screen)
        sinks: list[MetricSink] = []
        loggers = logger_names(config.trainer.logger)
        recorder = Recorder(screen, sinks, config.trainer.total_training_steps, lines=CONSOLE in loggers)
        plane_process = await stack.enter_async_context(_local_plane(config, files.logs))
        await stack.enter_async_context(ray_session(config.ray, config.trainer))
        roles = _roles(config)
        await require_cpus(len(roles), config.ray.cpus_per_worker)
        processes = _start_processes(roles, config, files.logs)
        stack.callback(_kill, processes)
        workers = _workers(processes, config)
        model_path = _given_model(config) or await _demo_model(config, processes["actor"], screen)
        store = Path(stack.enter_context(TemporaryDirectory(prefix="rl-app-ppo-")))
        await _build(config, workers, model_path, plane_process, store, files.samples, plugins)
        plane = await connect(plane_process.descriptor)
        stack.push_async_callback(plane.close)
        after = start.checkpoint.manifest.step if start.checkpoint else None
        for line in kept_metrics(files.metrics, -1 if after is None else after):
            recorder.remember(int(line["step"]), line)
        facts = RunFacts(folder=files.folder, config=flat_settings(to_yaml(config)), after=after)
        for sink in (JSONLSink(files.metrics), *open_sinks(loggers, facts)):
            sinks.append(sink)
            stack.callback(sink.close)
        data = open_data(config, model_path)
        trainer = PPOTrainer(_parts(config, data, graph, plane, workers, recorder, files, plugins))
        try:
            if start.checkpoint is not None:
                await trainer.resume(start.checkpoint)
            await trainer.fit()
        finally:
            _write_curve(files, recorder)
        temporary = files.folder / ".checkpoint"
        await trainer.save(temporary)
        publish_folder(temporary, files.checkpoint)
    return recorder


def _parts(
    config: AppConfig,
    data: Mapping[str, Prompts],
    graph: StepGraph,
    plane: DataPlane,
    workers: Workers,
    recorder: Recorder,
    files: RunFiles,
    plugins: PluginPolicy,
) -> TrainerParts:
    sync, on_step = None, recorder.on_step
    if config.checkpoint_engine.enabled:
        sender = RemoteSender(workers.actor)
        sync = make_sync(config.checkpoint_engine, plugins, sender, workers.rollout)
        on_step = measured(sync, sender, recorder.on_step)
    return TrainerParts(
        graph=graph,
        plane=plane,
        workers=workers,
        weight_sync=sync,
        train_order=train_order(config, data["train"]),
        validation_size=len(data["val"]),
        rollout=config.rollout,
        actor=config.actor,
        critic=config.critic,
        filter_groups=config.algorithm.filter_groups,
        loop=config.trainer,
        on_step=on_step,
        checkpoints=CheckpointWriter(
            files.checkpoints,
            config=to_yaml(config),
            keep=config.trainer.max_ckpt_to_keep,
            workers=workers,
            timeout_s=config.trainer.stage_timeout_s,
        ),
        hooks=named_hooks(config.trainer.hooks),
    )


@asynccontextmanager
async def _local_plane(config: AppConfig, logs: Path) -> AsyncGenerator[LocalPlane]:
    plane = await asyncio.to_thread(start_local_plane, config.transfer_queue, log_dir=logs)
    try:
        yield plane
    finally:
        await asyncio.to_thread(plane.close)


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


def _has_reference(config: AppConfig) -> bool:
    """Whether the reference policy has processes of its own; with LoRA it is the actor without its adapter."""
    return needs_reference(config.algorithm, config.actor) and not config.lora.rank


def _start_processes(roles: Mapping[str, Role], config: AppConfig, logs: Path) -> dict[str, RayWorker]:
    threads, cpus = config.trainer.threads_per_worker, config.ray.cpus_per_worker
    return {name: RayWorker(role, name, logs / f"{name}.log", threads, cpus) for name, role in roles.items()}


def _workers(processes: Mapping[str, RayWorker], config: AppConfig) -> Workers:
    by_role: dict[Role, list[RayWorker]] = {"ref": [], "critic": []}
    for process in processes.values():
        by_role.setdefault(process.role, []).append(process)
    colocated = needs_reference(config.algorithm, config.actor) and not by_role["ref"]
    return Workers(
        rollout=by_role["rollout"],
        reward=processes["reward"],
        actor=by_role["actor"],
        ref=by_role["actor"] if colocated else by_role["ref"],
        critic=by_role["critic"],
    )


def _kill(processes: Mapping[str, RayWorker]) -> None:
    for process in processes.values():
        process.kill()


async def _demo_model(config: AppConfig, actor: RayWorker, screen: Screen) -> Path:
    start, path, worked = time.perf_counter(), "", False
    screen.bar("starting workers", 0, 1)
    async for progress in actor.warm_up(to_yaml(config)):
        if progress.path:
            path = progress.path
            continue
        worked = True
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


async def _build(
    config: AppConfig,
    workers: Workers,
    model_path: Path,
    plane: LocalPlane,
    store: Path,
    samples: Path,
    plugins: PluginPolicy,
) -> None:
    """Have all processes load what they need; the ranks of a role meet through a file in `store`."""
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
                samples=str(samples),
                plugins=plugins,
            )
            calls.append(worker.call("build", msgspec.msgpack.encode(call), timeout_s=config.ray.start_timeout_s))
    await asyncio.gather(*calls)


def _write_curve(files: RunFiles, recorder: Recorder) -> None:
    if recorder.validation or recorder.reward:
        draw_curve(files.curve, recorder.curves, "accuracy")


def write_config(config: AppConfig, files: RunFiles) -> None:
    """Write the resolved configuration, first of all files."""
    with writing(files.config):
        files.config.write_text(to_yaml(config), encoding="utf-8")
        files.logs.mkdir(exist_ok=True)
