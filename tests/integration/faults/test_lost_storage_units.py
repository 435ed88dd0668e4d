"""Storage units are killed during a run.

If one is left, the run generates the lost rows again; if none is left, it ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest
from app_runs import marked, started
from polling import until

from rl_transferqueue import connect
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.launch.find_plane import running_planes

STEPS = 6
PROMPTS, RESPONSES, VALIDATION = 8, 8, 16
REWARD = """
import time
from pathlib import Path

FOLDER = Path({folder!r})

def calls():
    with open(FOLDER / "calls", "ab") as file:
        file.write(b".")
    return (FOLDER / "calls").stat().st_size

def score(data_source, solution_str, ground_truth, extra_info=None):
    deadline = time.monotonic() + 120
    if calls() > {before}:
        (FOLDER / "held").touch()
        while not (FOLDER / "released").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    return float(solution_str.strip() == ground_truth)
"""
"""Waits in the second step. Calls are counted in a file: several processes make them."""


@pytest.fixture
def held_run(tmp_path, base_model, mark):
    """Yield a run that waits for rewards with rows in its data plane, the plane, and a folder."""
    (tmp_path / "reward.py").write_text(REWARD.format(folder=str(tmp_path), before=VALIDATION + PROMPTS * RESPONSES))
    run = started(
        mark,
        tmp_path / "run",
        f"model.path={base_model}",
        "--trust",
        f"{tmp_path}/reward.py",
        f"reward.function={tmp_path}/reward.py:score",
        "reward.timeout_s=200",
        f"trainer.total_training_steps={STEPS}",
        "transfer_queue.num_storage_units=2",
        "restart.max_per_hour=0",
        f"data.val_size={VALIDATION}",
        f"data.train_batch_size={PROMPTS}",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        "actor.use_kl_loss=false",
        lines=1,
    )
    try:
        until((tmp_path / "held").exists, "a step waits for its rewards")
        pids = {process.pid for process in marked(mark)}
        (plane,) = [found for found in running_planes().values() if found.controller.process.pid in pids]
        yield run, plane, tmp_path
    finally:
        run.kill()


async def units_with_rows(descriptor) -> set[int]:
    """Return the units that hold responses of the second step; wait until there are some."""
    async with await connect(descriptor) as client:
        keys: tuple[str, ...] = ()
        deadline = time.monotonic() + 60
        while not keys:
            assert time.monotonic() < deadline, "the second step has no responses"
            rows = await client.list_rows("train", fields=["responses"])
            keys = tuple(key for key in rows.keys if key.startswith("s2-"))
        query = ("train", keys, ("responses",), (0,) * len(keys))
        place = await client._reader._locate(query, deadline_after(60))
        return {block.span.unit for block in place.located.blocks}


async def rows_are_lost(descriptor) -> None:
    """Wait until the controller lists rows as lost.

    Until it does, readers are sent to the memory of the dead unit, which is still mapped.
    """
    async with await connect(descriptor) as client:
        deadline = time.monotonic() + 60
        while not (await client.stats()).lost:
            assert time.monotonic() < deadline, "the controller lists no lost rows"
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_one_of_two_units(held_run):
    run, plane, folder = held_run
    unit = min(asyncio.run(units_with_rows(plane)))
    os.kill(plane.units[unit].process.pid, signal.SIGKILL)
    asyncio.run(rows_are_lost(plane))
    (folder / "released").touch()
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, (out, err)
    said = [line for line in out.splitlines() if "a storage unit of the data plane died with rows of step" in line]
    assert len(said) == 1, out
    assert said[0].endswith("they are generated again, attempt 2 of 4")
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["training/global_step"] for m in metrics[1:]] == list(range(1, STEPS + 1))
    assert [m["weight_sync/version"] for m in metrics[1:]] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_run_without_storage_units_ends_and_says_so(held_run):
    run, plane, folder = held_run
    for unit in plane.units:
        os.kill(unit.process.pid, signal.SIGKILL)
    (folder / "released").touch()
    out, err = run.communicate(timeout=300)
    assert run.returncode == 1, (out, err)
    assert err.startswith("the run failed: ")
    assert "storage unit" in err
    assert "Traceback" not in err + out
