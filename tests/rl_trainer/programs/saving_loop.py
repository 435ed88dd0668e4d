"""Save checkpoints in an endless loop; scenarios/test_resume.py kills it.

Arguments: FOLDER KEEP. Prints the step of each checkpoint after it is published. Each of its three
workers writes 64 files that contain only the number of the step.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rl_trainer import Worker, Workers
from rl_trainer.checkpoints.checkpoint_folder import RunState, newest_whole
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.workers.stateful import StatefulWorker

FILES = 64


class Numbers(StatefulWorker):
    handlers = StatefulWorker.state_handlers
    step = 0

    def copy_state(self, part):
        content = str(self.step) * 4096

        def write(folder):
            paths = [folder / f"{i}.txt" for i in range(FILES)]
            for path in paths:
                path.write_text(content)
            return paths

        return {part: write}


class LocalWorker:
    name, bytes_moved = "w", 0

    def __init__(self, worker: Worker):
        self.worker = worker

    async def call(self, method, payload, *, timeout_s):
        return await self.worker.handle(method, payload)


async def main() -> None:
    folder, keep = Path(sys.argv[1]), int(sys.argv[2])
    parts = [Numbers() for _ in range(3)]
    actor, critic, reward = (LocalWorker(part) for part in parts)
    workers = Workers(rollout=[], actor=[actor], critic=[critic], reward=reward)
    found, _ = newest_whole(folder)
    step = found.manifest.step if found else 0
    writer = CheckpointWriter(folder, config="", keep=keep, workers=workers, timeout_s=120)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        step += 1
        for part in parts:
            part.step = step
        await writer.begin(RunState(step=step), score=-float(step))
        for part in parts:
            part.step = -1  # the save must write the copied step
        await writer.finish()
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


asyncio.run(main())
