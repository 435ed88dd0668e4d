"""The rollout worker answers other calls while it reads images."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from replay_buffers import leased

from rl_protocol import RolloutError
from rl_protocol.ports import ImageInput, SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptRow, RolloutWorker
from rl_trainer.workers.messages import Partition, RolloutCall

ROWS = [
    PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="", images=("a.png",)),
    PromptRow(prompt_ids=(4,), data_source="d", ground_truth="", images=("b.png",)),
]
CALL = RolloutCall(
    partition=Partition(name="train", split="train", step=0, n=1, sampling=SamplingParams(max_new_tokens=3)),
    prompts=leased({"p0": 0, "p1": 1}),
)


class SlowReader:
    """A reader that returns once the event loop has run, and fails if the loop is blocked."""

    def __init__(self, loop):
        self._loop = loop
        self.read = []

    def __call__(self, paths, prompt_ids):
        loop_ran = threading.Event()
        self._loop.call_soon_threadsafe(loop_ran.set)
        if not loop_ran.wait(60):
            raise RolloutError("the event loop did not run while an image was read")
        self.read.append(tuple(paths))
        return (ImageInput(np.full((4, 96), len(self.read), np.float32), (1, 2, 2)),)


def rollout(make_reader):
    async def body():
        plane, reader = MemoryDataPlane(), make_reader(asyncio.get_running_loop())
        worker = RolloutWorker(plane, BigramEngine(), {"train": ROWS}, images=reader)
        await worker.rollout(CALL)
        rows = await plane.list_rows("train/prompts")
        return reader, await plane.get(rows, ["image_patches"])

    return asyncio.run(body())


def test_the_event_loop_runs_while_an_image_is_read():
    reader, data = rollout(SlowReader)
    assert reader.read == [("a.png",), ("b.png",)]
    # each prompt has its own image
    assert [row.reshape(-1)[0] for row in data.ragged("image_patches").rows()] == [1, 2]


def test_an_image_that_can_not_be_read_is_the_error_of_the_call():
    def failing(loop):
        def read(paths, prompt_ids):
            raise RolloutError(f"The image {paths[0]} can't be read.")

        return read

    with pytest.raises(RolloutError, match=r"The image a\.png can't be read"):
        rollout(failing)
