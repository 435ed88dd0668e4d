"""A reward function that misbehaves in every known way on one sample in a hundred."""

from __future__ import annotations

import asyncio
import textwrap

import numpy as np
import pytest
from trust import trust

from rl_protocol import BatchData, KVBatchMeta, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.rewards import ScorerPool
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.sample_log import SampleLog

HOSTILE = """
import os, time
WAYS = ["loop", "fork", "memory", "raise", "none", "nan", "text", "exit"]
def score(data_source, solution_str, ground_truth, extra_info=None):
    number = int(solution_str)
    if number % 100 != 7:
        return {"score": number / 1000, "pred": solution_str}
    match WAYS[number // 100]:
        case "loop":
            while True: pass
        case "fork":
            if os.fork() == 0:
                while True: time.sleep(1)
            while True: time.sleep(1)
        case "memory": return float(len(bytearray(10 * 2**30)))
        case "raise": raise RuntimeError("on purpose")
        case "none": return None
        case "nan": return float("nan")
        case "text": return "0.5"
        case "exit": raise SystemExit(3)
"""
KINDS = ["timeout", "timeout", "exception", "exception", "no_number", "no_number", "no_number", "died"]


@pytest.mark.slow
def test_one_hostile_sample_in_a_hundred_costs_itself_and_no_other(tmp_path, caplog):
    path = tmp_path / "hostile.py"
    path.write_text(textwrap.dedent(HOSTILE))
    trust(path)
    hostile = {f"p/{i}/0": kind for i, kind in zip(range(7, 800, 100), KINDS, strict=True)}

    async def run():
        plane, algorithm = MemoryDataPlane(), AlgorithmConfig()
        facts = {name: ObjectColumn.from_values([value]) for name, value in FACTS.items()}
        await plane.put(prompt_partition("train"), ["p"], BatchData({"prompts": ragged([[2]], "int64"), **facts}))
        data = BatchData({"responses": ragged([[i] for i in range(800)], "int64")})
        batch = await plane.put("train", [f"p/{i}/0" for i in range(800)], data)
        pool = await ScorerPool.open(f"{path}:score", workers=2, timeout_s=10.0, memory_mb=2048)
        samples = SampleLog(tmp_path / "samples")
        worker = RewardWorker(
            plane,
            step_columns(algorithm, ActorConfig()),
            pool,
            lambda ids: "".join(map(str, ids)),
            RewardSettings(algorithm=algorithm, response_length=4),
            samples=samples,
        )
        call = StageCall(step=1, batch=KVBatchMeta(partition="train", keys=batch.keys))
        try:
            rewarded = await asyncio.wait_for(worker.run("reward", call), 300)
            validated = await asyncio.wait_for(worker.run("evaluate", call), 300)
        finally:
            await pool.close()
            samples.close()
        tagged = await plane.list_rows("train")
        scored = await plane.list_rows("train", fields=["scores", "acc"])
        scores = (await plane.get(scored, ["scores"])).dense("scores").values
        return rewarded, validated, tagged, scored, scores

    rewarded, validated, tagged, scored, scores = asyncio.run(run())
    assert set(rewarded.failed) == set(hostile)
    assert rewarded.metrics == {
        "reward/failures/timeout": 2.0,
        "reward/failures/exception": 2.0,
        "reward/failures/no_number": 3.0,
        "reward/failures/died": 1.0,
    }
    tags = {
        key: tag["reward_failure"] for key, tag in zip(tagged.keys, tagged.tags, strict=True) if "reward_failure" in tag
    }
    assert tags == hostile
    for key, kind in hostile.items():
        assert f"reward failed ({kind}) for sample {key!r}" in caplog.text
    assert set(scored.keys) == set(tagged.keys) - set(hostile)
    np.testing.assert_allclose(scores, [int(key.split("/")[1]) / 1000 for key in scored.keys], rtol=1e-6)
    assert validated.metrics["val-aux/s/reward_failures"] == 8.0
    expected = sum(i / 1000 for i in range(800) if i % 100 != 7) / 800
    assert validated.metrics["val-core/s/acc/mean@800"] == pytest.approx(expected)
    assert len((tmp_path / "samples" / "1.jsonl").read_text().splitlines()) == 800


FACTS = {"data_source": "s", "ground_truth": "", "extra_info": {}}
