"""One run: start everything, train, write the checkpoint, and stop everything in reverse order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, dataclass, replace

from rl_app_ppo.cluster.lost_processes import fate, named_losses, named_remote_losses
from rl_app_ppo.cluster.ray_session import write_timeline
from rl_app_ppo.config.loading import flat_settings, to_yaml
from rl_app_ppo.config.loss_parts import learns_from_rewards
from rl_app_ppo.config.placement import rollout_in_actor
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.earlier_model import EarlierModel
from rl_app_ppo.driver.hang_watch import hang_watch
from rl_app_ppo.driver.processes import ProcessPlan, start_processes
from rl_app_ppo.driver.replicas import Replica, ReplicaSync
from rl_app_ppo.driver.report_writer import ReportWriter
from rl_app_ppo.driver.restart_policy import RestartPolicy
from rl_app_ppo.driver.weight_sync import OnStep, make_sync, measured
from rl_app_ppo.driver.workers import WorkerPool
from rl_app_ppo.inputs.data import about_validation, sessions_of, train_order
from rl_app_ppo.outputs.answers import drop_samples_after
from rl_app_ppo.outputs.console import LossNotes, OldLogProbNotes, Screen
from rl_app_ppo.outputs.metric_sinks import CONSOLE, logger_names, open_sinks
from rl_app_ppo.outputs.metrics_file import JSONLSink, kept_metrics
from rl_app_ppo.outputs.profiling import Profiling
from rl_app_ppo.outputs.recorder import Recorder
from rl_app_ppo.outputs.resume import Start
from rl_app_ppo.outputs.run_folder import UNPUBLISHED, publish_folder
from rl_app_ppo.outputs.run_journal import describe, keep_rows
from rl_app_ppo.outputs.run_record import RunRecord
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.outputs.trackers import RunFacts
from rl_app_ppo.outputs.training_warnings import RewardFailures, TrainingWarnings
from rl_protocol.ports import DataPlane, MetricSink
from rl_trainer import PPOTrainer, StepGraph, TrainerParts, Workers
from rl_trainer.checkpoints.kept_batches import drop_after
from rl_trainer.data.prompt_rows import TOOL_AGENT
from rl_trainer.data.validation_split import PreparedPrompts
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.driver.hooks import Hook, named_hooks
from rl_trainer.driver.trainer_parts import BatchFolder
from rl_trainer.rewards import functions_of, parse_terms
from rl_trainer.rewards.loading import written_at
from rl_trainer.workers.columns import PARTITIONS
from rl_transferqueue import LocalPlane, connect
from rl_transferqueue.consume import prompt_groups
from rl_transferqueue.consume.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunPlan(ProcessPlan):
    """The checked inputs of a run."""

    graph: StepGraph
    """The stages of a step, from `Facts`."""
    data: Mapping[str, PreparedPrompts]
    """The prompts by split, from `Facts`."""
    start: Start
    """The beginning, or a checkpoint."""
    record: RunRecord
    """What the driver records."""
    restarts: RestartPolicy
    """As in ProcessPlan; always there."""
    steps_only: bool = False
    """Whether the run only trains, without validation, checkpoints and a final model."""

    @property
    def last_step(self) -> int | None:
        """Step of the checkpoint that the run resumes from; None: it starts from the beginning."""
        return self.start.checkpoint.manifest.step if self.start.checkpoint else None


async def run(plan: RunPlan, screen: Screen, startup: Startup) -> Recorder:
    """Train as planned.

    Args:
        plan: what to do.
        screen: shows progress.
        startup: times the phases until the first step.

    Raises:
        RLError: the run failed; its processes have ended and its files are closed by then.
    """
    config, files = plan.config, plan.files
    async with AsyncExitStack() as stack:
        stack.enter_context(screen)
        sinks: list[MetricSink] = []
        loggers = logger_names(config.trainer.logger)
        warnings = _warnings(plan, screen)
        recorder = Recorder(
            screen,
            sinks,
            config.trainer.total_training_steps,
            warnings,
            startup,
            lines=CONSOLE in loggers,
            record=plan.record,
        )
        started = await start_processes(plan, stack, screen, startup)
        local_plane, pool, named_servers = started.plane, started.pool, started.servers
        plane, buffers = await _connect_plane(config, local_plane, stack)
        last_step = plan.last_step
        drop_after(files.batches, last_step or 0)
        drop_samples_after(files.samples, last_step or 0)
        for line in kept_metrics(files.metrics, -1 if last_step is None else last_step):
            recorder.remember(int(line["step"]), line)
        facts = RunFacts(folder=files.folder, config=flat_settings(to_yaml(config)), after=last_step)
        with startup.phase("loggers", "opening loggers"):
            for sink in (JSONLSink(files.metrics), *open_sinks(loggers, facts, screen.note)):
                sinks.append(stack.enter_context(closing(sink)))
        data = {"train": plan.data["train"]} if plan.steps_only else plan.data
        recorder.problems = {"validation": len(data.get("val", ())), "training": config.data.train_batch_size}
        if not plan.steps_only and (about := about_validation(config, data)):
            screen.note(about)
        hooks = {
            **named_hooks(config.trainer.hooks),
            **_console_hooks(plan, screen),
            "reward failures": RewardFailures(warnings),
            "the model": EarlierModel(files.checkpoint, config.trainer.total_training_steps),
            "the report": (report := ReportWriter(files, screen.note)),
        }
        stack.push_async_callback(report.close)
        if config.trainer.profile_steps:
            profiling = _profiling(plan, pool)
            stack.push_async_callback(profiling.close)
            hooks["trainer.profile_steps"] = profiling
        rollout = _connect_rollout(plan, pool, started.ray_servers, recorder.on_step, screen)
        trainer = PPOTrainer(_trainer_parts(plan, rollout, plane, buffers, data, hooks))
        async with hang_watch(config.trainer.hang_s, pool, buffers, named_servers, files, screen):
            # the ranks of a model fail with the first of them that dies, and only name its socket
            with named_losses(pool.worker_pids, pool.hung, deaths_named=True):
                async with named_remote_losses(pool.remote_ends(), pool.hung):
                    await _train(plan, trainer, local_plane, recorder, screen, startup, validates="val" in data)
                    await pool.close_records()
    return recorder


def _warnings(plan: RunPlan, screen: Screen) -> TrainingWarnings:
    config = plan.config
    rewards = ", ".join(written_at(name) for name in functions_of(parse_terms(config.reward.function)))
    control = config.algorithm.kl_ctrl
    return TrainingWarnings(
        screen.note,
        tools=config.rollout.session == TOOL_AGENT,
        reward_log=plan.files.logs / "reward.log",
        rewarded=learns_from_rewards(config),
        reward=f"reward.function={rewards}",
        target_kl=control.target_kl if control.type == "adaptive" else None,
        record=plan.record.alarm,
    )


async def _train(
    plan: RunPlan,
    trainer: PPOTrainer,
    plane: LocalPlane,
    recorder: Recorder,
    screen: Screen,
    startup: Startup,
    *,
    validates: bool,
) -> None:
    """Train, from the checkpoint if there is one, and write the policy."""
    config, files = plan.config, plan.files
    try:
        if plan.start.checkpoint is not None or plane.recovery is not None or config.lora.adapter_path:
            with startup.phase("resume", "loading the checkpoint" if plan.start.checkpoint else "sending the adapter"):
                rows = await trainer.resume(plan.start.checkpoint)
            if plane.recovery is not None and plane.recovery.rows_kept:
                screen.note(describe(plane.recovery, rows))
        startup.done()
        before = validates and config.trainer.val_before_train and plan.last_step is None
        startup.begin("first validation" if before else "first step")
        await trainer.fit()
        if config.async_rl.max_staleness:
            screen.note(f"rollouts: {trainer.group_counts()}")
    finally:
        startup.end()
        recorder.write_curve(files.curve)
    if plan.steps_only:
        return
    temporary = files.folder / UNPUBLISHED
    await trainer.save(temporary)
    publish_folder(temporary, files.checkpoint)


async def _connect_plane(
    config: AppConfig, local_plane: LocalPlane, stack: AsyncExitStack
) -> tuple[DataPlane, Mapping[str, ReplayBuffer]]:
    """The driver's client of the data plane, and the replay buffer of each partition.

    Every step takes all groups that it starts, so no group waits or gets too old.
    """
    plane = await connect(local_plane.descriptor)
    stack.push_async_callback(plane.close)
    settings = prompt_groups.ReplayConfig(
        groups_per_version=config.data.train_batch_size,
        when_stale="drop",
        max_staleness=config.async_rl.max_staleness,
        **asdict(config.replay),
    )
    buffers = {name: ReplayBuffer(plane, name, settings) for name in PARTITIONS}
    for buffer in buffers.values():
        await stack.enter_async_context(buffer)
    return plane, buffers


@dataclass(frozen=True)
class _Rollout:
    """The workers with replaceable rollout replicas, and the weight sync to these."""

    workers: Workers
    sync: ReplicaSync | None
    """None: the weight synchronization is off."""
    on_step: OnStep


def _connect_rollout(
    plan: RunPlan, pool: WorkerPool, servers: Mapping[int, str], on_step: OnStep, screen: Screen
) -> _Rollout:
    """Connect the rollout workers; `servers` are those of Ray, by process id."""
    config, workers, manager = plan.config, pool.workers, None
    if config.checkpoint_engine.enabled:
        manager = make_sync(
            config.checkpoint_engine,
            plan.plugins,
            workers.actor,
            workers.rollout,
            screen.weights,
            one_process=rollout_in_actor(config.placement),
        )
        on_step = measured(manager, on_step)

    def obstacle() -> str:
        if any(map(fate, servers)):
            return "Ray does not run."
        return f"{'; '.join(lost)}." if (lost := pool.ended_models()) else ""

    def say(line: str) -> None:
        logger.warning(line)
        screen.note(line)

    replicas = {worker: Replica(worker, manager, plan.restarts, say, obstacle) for worker in pool.replaceable}
    whole = not config.sends_adapters
    sync = (
        ReplicaSync(manager, list(replicas.values()), whole=whole, on_synced=plan.record.weights_synced)
        if manager
        else None
    )
    return _Rollout(replace(workers, rollout=[replicas.get(worker, worker) for worker in pool.rollout]), sync, on_step)


def _trainer_parts(
    plan: RunPlan,
    rollout: _Rollout,
    plane: DataPlane,
    buffers: Mapping[str, ReplayBuffer],
    data: Mapping[str, PreparedPrompts],
    hooks: Mapping[str, Hook],
) -> TrainerParts:
    config = plan.config
    checkpoints = CheckpointWriter(
        plan.files.checkpoints,
        config=to_yaml(config),
        inputs=plan.inputs.digests,
        keep=config.trainer.max_ckpt_to_keep,
        workers=rollout.workers,
        timeout_s=config.trainer.stage_timeout_s,
    )
    return TrainerParts(
        graph=plan.graph,
        plane=plane,
        buffers=buffers,
        replay=config.replay,
        async_rl=config.async_rl,
        workers=rollout.workers,
        weight_sync=rollout.sync,
        sync_first=bool(config.lora.adapter_path),
        rollout_memory=rollout.sync if config.rollout.free_cache_engine else None,
        train_order=train_order(config, data["train"]),
        sessions=sessions_of(config, data["train"]),
        validation_size=len(data["val"]) if "val" in data else 0,
        rollout=config.rollout,
        actor=config.actor,
        critic=config.critic,
        filter_groups=config.algorithm.filter_groups,
        old_log_prob_tolerance=config.algorithm.old_log_prob_tolerance,
        loop=config.trainer,
        on_step=rollout.on_step,
        checkpoints=None if plan.steps_only else checkpoints,
        batches=BatchFolder(plan.files.batches, to_yaml(config)),
        # a checkpoint releases them
        keep_rows=None if plan.steps_only else keep_rows(config, plan.files.folder, plan.inputs),
        hooks=hooks,
    )


def _console_hooks(plan: RunPlan, screen: Screen) -> dict[str, Hook]:
    hooks: dict[str, Hook] = {"the console": LossNotes(screen)}
    if "log_prob_gap" in plan.graph:
        hooks["old log-probs"] = OldLogProbNotes(screen.note, plan.config.algorithm.old_log_prob_tolerance)
    return hooks


def _profiling(plan: RunPlan, pool: WorkerPool) -> Profiling:
    models = [process for process in pool.processes if process.roles != ("reward",)]
    return Profiling(plan.files.profile, frozenset(plan.config.trainer.profile_steps), models, write_timeline)
