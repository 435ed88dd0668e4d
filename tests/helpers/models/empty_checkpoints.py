"""Checkpoints of runs whose workers have no state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_trainer import Workers
from rl_trainer.checkpoints.checkpoint_folder import RunState
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.workers.stateful import StatefulWorker


class Nothing(StatefulWorker):
    handlers = StatefulWorker.state_handlers
    name, bytes_moved = "w", 0

    def copy_state(self, part):
        return {}

    async def call(self, method, payload, *, timeout_s):
        return await self.handle(method, payload)


def save_checkpoints(
    folder: Path,
    steps: Sequence[int],
    config: str,
    *,
    inputs: Mapping[str, Mapping[str, str]] | None = None,
    prompt_order: bytes = b"",
) -> None:
    """Write a checkpoint of each step of a run with this configuration, YAML, and these files."""

    async def save():
        workers = Workers(rollout=[], actor=[Nothing()], reward=Nothing())
        writer = CheckpointWriter(folder, config=config, inputs=inputs, keep=0, workers=workers, timeout_s=120)
        for step in steps:
            await writer.begin(RunState(step=step, prompt_order=prompt_order), None)
        await writer.finish()

    asyncio.run(save())
