"""Responses that are trained on, written down beside the loop."""

from __future__ import annotations

import asyncio
import json

from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.fakes import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardWorker, build_graph
from rl_trainer.messages import StageCall
from rl_trainer.rewards import InlineScorer
from rl_trainer.sample_log import SampleLog, TrainSamples


def run(folder, every, calls):
    """What lies in the folder after the calls, (partition, step, uid) each; responses 7 and 8 to the prompt 5 6 in one session."""

    async def work():
        plane, algorithm, log = MemoryDataPlane(), AlgorithmConfig(), SampleLog(folder, "train-")

        def judge(source, text, truth, extra):
            return {"score": float(text == truth), "pred": text} if text != "9" else None

        worker = RewardWorker(
            plane,
            build_graph(algorithm, ActorConfig()),
            InlineScorer(judge),
            lambda ids: " ".join(map(str, ids)),
            algorithm,
            4,
            train_samples=TrainSamples(log, every),
        )
        for partition, step, uid in calls:
            facts = {"data_source": "s", "ground_truth": "8", "extra_info": {}}
            columns = {name: ObjectColumn.from_values([value]) for name, value in facts.items()}
            await plane.put(
                prompt_partition(partition), [uid], BatchData({"prompts": ragged([[5, 6]], "int64"), **columns})
            )
            keys = [f"{uid}/0/0", f"{uid}/0/1", f"{uid}/1/0"]
            batch = await plane.put(partition, keys, BatchData({"responses": ragged([[7], [8], [9]], "int64")}))
            result = await worker.reward(StageCall(step=step, batch=batch.without_tags()))
            assert result.failed == (f"{uid}/1/0",)
            await asyncio.to_thread(log.flush)
        log.close()

    asyncio.run(work())
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_every_so_many_steps_what_was_scored_is_written_with_why_or_why_not(tmp_path):
    files = run(tmp_path, 2, [("train", step, "p") for step in (1, 2, 3, 4)])
    assert set(files) == {"train-2.jsonl", "train-4.jsonl"}
    right, failed = files["train-2.jsonl"]
    assert right == {
        "key": "p/0/1",
        "data_source": "s",
        "prompt": "5 6",
        "response": "8",
        "ground_truth": "8",
        "outcome": {"type": "scored", "numbers": {"acc": 1.0, "score": 1.0}, "texts": {"pred": "8"}},
    }
    assert (failed["key"], failed["outcome"]["kind"]) == ("p/1/0", "no_number")


def test_rounds_of_a_step_are_parts_and_baselines_are_not_trained_on(tmp_path):
    rounds = [("train", 1, "p"), ("train", 1, "q"), ("baseline", 1, "p"), ("train", 2, "p")]
    files = run(tmp_path, 1, rounds)
    assert set(files) == {"train-1.jsonl", "train-1-2.jsonl", "train-2.jsonl"}


def test_a_round_that_is_done_again_is_not_a_part_of_its_own(tmp_path):
    files = run(tmp_path, 1, [("train", 1, "p"), ("train", 1, "p"), ("train", 1, "q")])
    assert {name: rows[0]["key"] for name, rows in files.items()} == {
        "train-1.jsonl": "p/0/1",
        "train-1-2.jsonl": "q/0/1",
    }


def test_never_is_never(tmp_path):
    assert run(tmp_path, 0, [("train", 1, "p"), ("train", 5, "p")]) == {}
