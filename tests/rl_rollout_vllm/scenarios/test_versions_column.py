"""The version of each token, from vLLM over a fake client to the column of a trajectory."""

from __future__ import annotations

import asyncio

from rl_protocol.ports import Lease, SamplingParams
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptRow, RolloutWorker
from rl_trainer.workers.messages import LeasedPrompt, Partition, RolloutCall

ROW = PromptRow(prompt_ids=(2, 3), data_source="d", ground_truth="")
CALL = RolloutCall(
    partition=Partition(
        name="train", split="train", step=0, n=2, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True)
    ),
    prompts=(LeasedPrompt(Lease("train", "p", 0, (0, 1), 0, 600.0), 0),),
)


def test_weights_that_change_meanwhile_are_the_second_run(opened, other_weights):
    """5 tokens of version 0, and the other 7 of version 1."""
    engine, client = opened()
    client.stop_after = 5

    async def body():
        plane = MemoryDataPlane()
        running = asyncio.create_task(RolloutWorker(plane, engine, {"train": [ROW]}).rollout(CALL))
        async with asyncio.timeout(60):
            while client.stood_still < 2:  # noqa: ASYNC110 - the fake sends no events
                await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.load_weights, other_weights, 1)
        client.stop_after = None
        await running
        rows = await plane.list_rows("train")
        return rows, await plane.get(rows, ["rollout_versions"])

    rows, data = asyncio.run(body())
    assert [runs.tolist() for runs in data.ragged("rollout_versions").rows()] == [[[0, 5], [1, 7]]] * 2
    assert [(tag["version"], tag["newest_version"]) for tag in rows.tags] == [(0, 1)] * 2
