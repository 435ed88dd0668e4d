"""The log of scored training responses."""

from __future__ import annotations

import asyncio
import json
import threading

from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.rewards import Failure, InlineScorer
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.sample_log import SampleLog, SampleRow, TrainSamples


def run(folder, every, calls):
    """Return the files that `calls`, as (partition, step, uid), leave in the folder.

    Each call scores three responses to the prompt 5 6: 7 and 8 of one session, and 9, which fails.
    """

    async def work():
        plane, algorithm, log = MemoryDataPlane(), AlgorithmConfig(), SampleLog(folder, "train-")

        def judge(source, text, truth, extra):
            return {"score": float(text == truth), "pred": text} if text != "9" else None

        worker = RewardWorker(
            plane,
            step_columns(algorithm, ActorConfig()),
            InlineScorer(judge),
            lambda ids: " ".join(map(str, ids)),
            RewardSettings(algorithm=algorithm, response_length=4),
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
            result = await worker.run("reward", StageCall(step=step, batch=batch.without_tags()))
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


ROW = SampleRow(
    key="v0/0/0",
    data_source="s",
    prompt="1+1=",
    response="3",
    ground_truth="2",
    outcome=Failure(kind="timeout", message="late"),
)


def test_a_table_can_be_read_back(tmp_path):
    log = SampleLog(tmp_path / "samples")
    log.write(3, [ROW, ROW])
    log.close()
    log.close()
    lines = (tmp_path / "samples" / "3.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["outcome"] == {"type": "failure", "kind": "timeout", "message": "late"}
    assert json.loads(lines[0])["response"] == "3"
    assert "note" not in json.loads(lines[0])


def test_every_row_carries_what_a_reader_must_know(tmp_path):
    log = SampleLog(tmp_path, "train-", note="answers are written units first")
    log.write(3, [ROW, ROW])
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "train-3.jsonl").read_text().splitlines()]
    assert [row["note"] for row in rows] == ["answers are written units first"] * 2


def test_a_slow_disk_does_not_block(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    log = SampleLog(tmp_path)
    write = SampleLog._write
    monkeypatch.setattr(SampleLog, "_write", lambda *args: (gate.wait(20), write(*args)))
    log.write(1, [ROW])
    log.write(2, [ROW])  # returns while the first write is blocked
    gate.set()
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]
    assert "the samples of step 2 are left out" in caplog.text


def test_a_table_that_can_not_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = SampleLog(tmp_path / "file")
    log.write(1, [ROW])
    log.close()
    assert "the samples of step 1 can't be written" in caplog.text
