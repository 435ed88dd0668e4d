"""A worker process, before and during the construction of its worker."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from rl_app_ppo.worker.messages import CLOSE_RECORD, BuildCall
from rl_app_ppo.worker.process import WorkerProcess
from rl_protocol import KVBatchMeta, WorkerError
from rl_trainer import Worker
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_file import RecordFile
from rl_trainer.workers.messages import ReadAheadCall, StageCall, StageResult


class Threads(Worker):
    """A worker that records the compute threads of each call."""

    handlers: ClassVar = {"update_actor": StageCall, "read_ahead": ReadAheadCall}

    def __init__(self):
        self.seen = []

    async def update_actor(self, *_):
        import torch

        self.seen.append(torch.get_num_threads())
        return StageResult()

    read_ahead = update_actor


@pytest.mark.parametrize(("threads", "seen"), [(0, [6, 2, 2, 6]), (1, [1, 1, 1, 1])])
def test_a_stage_computes_with_the_cores_that_the_stages_beside_it_leave(monkeypatch, tmp_path, threads, seen):
    """trainer.threads_per_worker=0; a call that says nothing about cores changes nothing."""
    monkeypatch.setattr("rl_app_ppo.worker.cores.usable_cores", lambda: 6)
    batch = KVBatchMeta(partition="train", keys=("p/0/0",))
    calls = [
        ("update_actor", StageCall(step=1, batch=batch, side_by_side=1)),
        ("update_actor", StageCall(step=1, batch=batch, side_by_side=3)),
        ("read_ahead", ReadAheadCall(stage="update_actor", batch=batch)),
        ("update_actor", StageCall(step=1, batch=batch, side_by_side=1)),
    ]
    process, worker = WorkerProcess(["actor"], "actor", tmp_path / "log", threads), Threads()
    process._workers["actor"] = worker, None
    for method, call in calls:
        asyncio.run(process.call("actor", method, msgspec.msgpack.encode(call)))
    assert worker.seen == seen


def test_the_end_of_a_run_finds_every_call_in_the_record(tmp_path):
    """A process is killed at the end; rows are written a second after the first of them."""
    process = WorkerProcess(["actor"], "actor", tmp_path / "log", 1)
    process._workers["actor"] = Threads(), None
    process._record = RecordFile(tmp_path / "record", "actor")
    call = msgspec.msgpack.encode(StageCall(step=1, batch=KVBatchMeta(partition="train", keys=("p/0/0",))))

    async def main():
        for _ in range(3):
            await process.call("actor", "update_actor", call)
        await process.call("actor", CLOSE_RECORD, b"")
        await process.call("actor", CLOSE_RECORD, b"")  # a second end does nothing

    asyncio.run(main())
    assert [span.stage for span in read_record(tmp_path / "record").spans] == ["update_actor"] * 3
    asyncio.run(WorkerProcess(["actor"], "actor", tmp_path / "log", 1).call("actor", CLOSE_RECORD, b""))  # no record


@pytest.mark.parametrize("lends", [False, True])
def test_a_process_whose_gpu_a_replica_uses_gives_cached_memory_back_after_each_call(monkeypatch, tmp_path, lends):
    released = list[str]()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: released.append("all"))
    batch = KVBatchMeta(partition="train", keys=("p/0/0",))

    async def calls():
        process = WorkerProcess(["actor"], "actor", tmp_path / "log", 1)
        process._workers = {"actor": (Threads(), None)}
        process._lends_gpu = lends
        call = msgspec.msgpack.encode(StageCall(step=1, batch=batch))
        await process.call("actor", "update_actor", call)
        with pytest.raises(WorkerError):
            await process.call("actor", "unknown", call)

    asyncio.run(calls())
    assert released == (["all", "all"] if lends else [])


@pytest.mark.parametrize("lends", [False, True])
def test_a_process_whose_gpu_a_replica_uses_keeps_no_memory_of_loading_its_models(monkeypatch, tmp_path, lends):
    """FSDP2 has whole weights on the GPU before it shards them; vLLM starts afterwards."""
    done = list[str]()

    async def build_workers(*_):
        done.append("built")
        return {}

    monkeypatch.setattr("rl_app_ppo.worker.build.build_workers", build_workers)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: done.append("released"))
    process = WorkerProcess(["actor"], "actor", tmp_path / "log", 1)
    call = msgspec.msgpack.encode(BuildCall(config="", model_path="", plane=b"", lends_gpu=lends))
    try:
        asyncio.run(process.call("actor", "build", call))
    finally:
        gc.unfreeze()
    assert done == ["built", *(["released"] if lends else [])]


def _call_that_raises(error):
    raise error


def _caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (KeyError("table"), 1),
        (WorkerError("not built"), 0),
        (_caused(WorkerError("the estimator raised"), KeyError("table")), 1),
    ],
)
def test_the_log_has_the_traceback_of_a_call_that_fails_unless_the_error_explains_itself(tmp_path, error, logged):
    """The driver gets only the message of a user's exception, and refers to this log."""
    process = WorkerProcess(["actor"], "actor", tmp_path / "log", 1)
    process._workers = {"actor": (SimpleNamespace(handle=lambda *_: _call_that_raises(error)), None)}
    with pytest.raises(type(error)):
        asyncio.run(process.call("actor", "update_actor", b""))
    log = (tmp_path / "log").read_text()
    assert log.count("worker actor failed in update_actor\n") == logged
    assert log.count("in _call_that_raises") == logged


PRINTS = """
import subprocess, sys
from pathlib import Path
from rl_app_ppo.worker.process import WorkerProcess
WorkerProcess(["reward"], "reward", Path(sys.argv[1]), 1, logs_output=True)
print("of the process")
subprocess.run(["sh", "-c", "echo of a child; echo an error >&2"], check=True)
import os
os.kill(os.getpid(), 9)
"""


def test_what_a_process_and_its_children_print_is_in_its_log_also_if_it_is_killed(tmp_path, monkeypatch):
    """A print in a reward function or a tool; Ray's own log is removed with its folder."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    log = tmp_path / "reward.log"
    ended = subprocess.run([sys.executable, "-c", PRINTS, log], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-9, "", "")
    started, *printed = log.read_text().splitlines()
    assert "worker reward starts" in started
    assert printed == ["of the process", "of a child", "an error"]
