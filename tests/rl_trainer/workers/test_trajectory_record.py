"""The trajectories that the reward worker records, with all their columns."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_file import RecordFile
from rl_trainer.rewards import InlineScorer
from rl_trainer.workers.columns import OLD_LOG_PROB, ROLLOUT
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.trajectory_record import RecordSettings, TrajectoryRecord, _gaps

TEXTS = {5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 3: "<eos>"}


def decode(ids):
    return " ".join(TEXTS[i] for i in ids)


def judge(source, text, truth, extra):
    return None if text == "nine <eos>" else {"score": float(text == truth), "style": 0.25, "pred": text}


async def work(folder, steps, freq, *, rollout_only=False):
    plane, algorithm, file = MemoryDataPlane(), AlgorithmConfig(), RecordFile(folder, "reward")
    worker = RewardWorker(
        plane,
        step_columns(algorithm, ActorConfig()),
        InlineScorer(judge),
        decode,
        RewardSettings(algorithm=algorithm, response_length=4),
        record=TrajectoryRecord(plane, file, decode, RecordSettings(freq=freq, count=8)),
    )
    facts = {"data_source": "s", "ground_truth": "eight <eos>", "extra_info": {}}
    columns = {name: ObjectColumn.from_values([value]) for name, value in facts.items()}
    await plane.put(prompt_partition("train"), ["p"], BatchData({"prompts": ragged([[5, 6]], "int64"), **columns}))
    data = BatchData(
        {
            "responses": ragged([[7, 3], [8, 3], [9, 3]], "int64"),
            "response_mask": ragged([[1, 1], [1, 1], [1, 1]], "bool"),
            "rollout_log_probs": ragged([[-0.5, -1.25], [-0.5, 0], [0, 0]], "float32"),
            "rollout_versions": ragged([[[3, 1], [4, 1]], [[4, 2]], [[4, 2]]], "int32"),
            "old_log_probs": ragged([[-0.25, -1.0], [-0.5, 0], [0, 0]], "float32"),
            "entropy": ragged([[0.5, 0.75], [0, 0], [0, 0]], "float32"),
        }
    )
    tags = [{"turns": 2, "tool_calls": 1, "tool_errors": 0, "finish": "stop", "version": 3}, {}, {}]
    batch = (await plane.put("train", ["p/0/0", "p/1/0", "p/2/0"], data, tags=tags)).without_tags()
    for step in steps:
        result = await worker.run("reward", StageCall(step=step, batch=batch))
        assert result.failed == ("p/2/0",)
        rows = batch.select_rows([0, 1])
        if rollout_only:
            rows = replace(rows, extra_info={OLD_LOG_PROB: ROLLOUT})
        await worker.run("adv", StageCall(step=step, batch=rows))
    file.close()
    return (await plane.get(batch.select_rows([0, 1]), ["advantages"])).ragged("advantages").values.tolist()


def test_every_column_of_a_chosen_trajectory_is_recorded(tmp_path):
    advantages = asyncio.run(work(tmp_path, [2], 2))
    record = read_record(tmp_path)
    failed, wrong, right = sorted(record.trajectories, key=lambda row: (row.why != "failed", row.key))
    assert (wrong.step, wrong.key, wrong.why) == (2, "p/0/0", "worst")
    assert (wrong.prompt, wrong.response, wrong.ground_truth) == ("five six", "seven <eos>", "eight <eos>")
    assert (wrong.prompt_ids, wrong.response_ids, wrong.response_mask) == ([5, 6], [7, 3], [1, 1])
    assert (wrong.rollout_log_probs, wrong.old_log_probs) == ([-0.5, -1.25], [-0.25, -1.0])
    assert (wrong.entropy, wrong.versions) == ([0.5, 0.75], [(3, 1), (4, 1)])
    assert [*wrong.advantages, *right.advantages] == [round(value, 4) for value in advantages]
    assert wrong.advantages[0] < 0 < right.advantages[0]
    assert (wrong.turns, wrong.tool_calls, wrong.finish) == (2, 1, "stop")
    assert wrong.reward == {"score": 0.0, "acc": 0.0, "style": 0.25}
    assert (right.reward["score"], right.texts) == (1.0, {"pred": "eight <eos>"})
    assert "must return a finite number" in failed.failure
    assert (failed.response, failed.advantages, failed.reward) == ("nine <eos>", [], {})
    assert record.tokens == {i: TEXTS[i] for i in (3, 5, 6, 7, 8, 9)}
    assert "LoopConfig.sample_freq=2" in record.rule


def test_log_probs_that_the_trainer_did_not_compute_are_not_recorded_as_its_own(tmp_path):
    asyncio.run(work(tmp_path, [1], 1, rollout_only=True))
    rows = {row.key: row for row in read_record(tmp_path).trajectories}
    assert rows["p/0/0"].rollout_log_probs == [-0.5, -1.25]
    assert rows["p/0/0"].old_log_probs == []
    assert rows["p/0/0"].advantages[0] < 0


def test_only_the_steps_that_are_due_are_recorded(tmp_path):
    asyncio.run(work(tmp_path, [1, 2, 3, 4], 2))
    assert {row.step for row in read_record(tmp_path).trajectories} == {2, 4}


def test_never_is_never(tmp_path):
    asyncio.run(work(tmp_path, [1, 2], 0))
    assert not list(tmp_path.iterdir())


def test_the_gap_of_a_row_is_the_largest_of_its_unmasked_tokens():
    """Rows of 2, 0, 1 and 0 tokens; the second token is masked."""
    data = BatchData(
        {
            "responses": ragged([[1, 2], [], [3], []], "int64"),
            "response_mask": ragged([[1, 0], [], [1], []], "bool"),
            "rollout_log_probs": ragged([[-1.0, -9.0], [], [-2.0], []], "float32"),
            "old_log_probs": ragged([[-1.5, -1.0], [], [-1.75], []], "float32"),
        }
    )
    assert _gaps(data) == [0.5, 0.0, 0.25, 0.0]
