"""Trains kept batches again, with the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rl_app_ppo.cluster.lost_processes import named_losses, named_remote_losses
from rl_app_ppo.driver.processes import ProcessPlan, start_processes
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.startup_times import Startup
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint
from rl_trainer.checkpoints.kept_batches import KeptBatch
from rl_trainer.driver.updates.batch_files import BatchTrainer, Retrained
from rl_trainer.driver.updates.stages import Updates
from rl_transferqueue import connect


async def retrain(
    plan: ProcessPlan,
    before: Checkpoint | None,
    folder: Path,
    batches: Sequence[KeptBatch],
    screen: Screen,
    startup: Startup,
) -> list[Retrained]:
    """Start the processes, and train the batches; see BatchTrainer.train.

    Args:
        plan: what to start, with the settings of the run.
        before: the state before the first batch; None: the beginning.
        folder: of the kept batches.
        batches: of consecutive steps.
        screen: shows progress.
        startup: times the phases of the start.

    Raises:
        RLError: it failed; the processes have ended.
    """
    config = plan.config
    async with AsyncExitStack() as stack:
        stack.enter_context(screen)
        started = await start_processes(plan, stack, screen, startup)
        plane = await connect(started.plane.descriptor)
        stack.push_async_callback(plane.close)
        startup.done()
        pool = started.pool
        updates = Updates(
            workers=pool.workers,
            actor=config.actor,
            critic=config.critic,
            rollout_n=config.rollout.n,
            seed=config.trainer.seed,
        )
        trainer = BatchTrainer(plane, updates, config.trainer.stage_timeout_s)
        with named_losses(pool.worker_pids, pool.hung, deaths_named=True):
            async with named_remote_losses(pool.remote_ends(), pool.hung):
                return await trainer.train(before, folder, batches)
