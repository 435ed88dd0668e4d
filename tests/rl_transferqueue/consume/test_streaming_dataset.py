"""`StreamingDataset` and `StreamingDataLoader`: ranks, deadlines, read-ahead, and workers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from polling import until
from tensordict import TensorDict

import rl_transferqueue.compat as tq
from rl_protocol import BatchData, ConfigError, KVBatchMeta, ObjectColumn, PlaneLostError, PlaneTimeout, dense, ragged
from rl_transferqueue import BlockingPlane, LocalPlane, TransferQueueConfig, connect_blocking, start_local_plane
from rl_transferqueue.consume.sampled_batches import DrawSettings
from rl_transferqueue.consume.samplers import (
    Groups,
    LengthBalanced,
    RankAware,
    Sampler,
    Sequential,
    Shares,
    WholeGroups,
)
from rl_transferqueue.consume.streaming_dataset import StreamingDataLoader, StreamingDataset

RANK = """
import json, sys
from rl_transferqueue import PlaneDescriptor
from rl_transferqueue.consume.sampled_batches import DrawSettings
from rl_transferqueue.consume.samplers import Groups, LengthBalanced
from rl_transferqueue.consume.streaming_dataset import StreamingDataLoader, StreamingDataset

dataset = StreamingDataset(
    PlaneDescriptor.from_json(sys.argv[1]),
    LengthBalanced(2, "len", Groups("uid", 2)),
    DrawSettings(partition="p", task="train", count=4, fields=("x", "jag", "text"), timeout_s=60),
    rank=int(sys.argv[2]),
    turns=6,
)
for data, meta in StreamingDataLoader(dataset):
    assert data.batch_size[0] == len(meta) == 4
    assert [row.shape[0] for row in data["jag"].unbind()] == [int(x) % 3 for x in data["x"]]
    assert data["text"] == [f"row {int(x)}" for x in data["x"]]
    print(json.dumps([list(meta.keys), data["x"].tolist()]), flush=True)
"""


def put(client: BlockingPlane, rows: range) -> None:
    data = BatchData(
        {
            "x": dense(np.array(list(rows), dtype=np.int64)),
            "jag": ragged([[1.0] * (i % 3) for i in rows], "float32"),
            "text": ObjectColumn.from_values(f"row {i}" for i in rows),
        }
    )
    client.put("p", [f"k{i}" for i in rows], data, tags=[{"uid": i // 2, "len": i % 7} for i in rows])


def stream(plane: LocalPlane, **given: Any) -> StreamingDataset:
    sampler = given.pop("sampler", Sequential())
    options = {name: given.pop(name) for name in ("rank", "turns", "first_turn", "ahead") if name in given}
    settings: dict[str, Any] = {"partition": "p", "task": "train", "count": 2, "fields": ("x",), "timeout_s": 60}
    return StreamingDataset(plane.descriptor, sampler, DrawSettings(**(settings | given)), **options)


def consumed(client: BlockingPlane) -> int:
    return int(client.consumption_status("p", task="train").flags.sum())


def test_two_rank_processes_see_each_row_exactly_once(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(20))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, plane.descriptor.to_json(), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    put(client, range(20, 37))  # ends in the middle of a group
    time.sleep(0.3)
    put(client, range(37, 48))
    seen: list[list[list[str]]] = []
    for process in ranks:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        turns = [json.loads(line) for line in out.splitlines()]
        assert all([f"k{x}" for x in xs] == keys for keys, xs in turns)
        seen.append([keys for keys, _ in turns])
    assert [len(turns) for turns in seen] == [6, 6]
    assert sorted(itertools.chain(*seen[0], *seen[1])) == sorted(f"k{i}" for i in range(48))
    for share in itertools.chain(*seen):
        numbers = sorted(int(key[1:]) for key in share)
        assert {n // 2 for n in numbers} == {numbers[0] // 2, numbers[-1] // 2}  # two whole groups
    client.clear("p")
    client.close()


def test_a_rank_that_restarts_gets_its_turns_again(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(12))
    everything = [
        [meta.keys for _, meta in stream(plane, sampler=RankAware(2), rank=rank, count=4, turns=3)] for rank in (0, 1)
    ]
    again = [meta.keys for _, meta in stream(plane, sampler=RankAware(2), rank=1, count=4, turns=3, first_turn=1)]
    assert again == everything[1][1:]
    assert sorted(itertools.chain(*everything[0], *everything[1])) == sorted(f"k{i}" for i in range(12))
    client.close()


def test_at_most_ahead_batches_are_drawn_ahead(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(20))
    batches = iter(stream(plane, ahead=2))
    first, meta = next(batches)
    assert first["x"].tolist() == [0, 1]
    assert meta.fields == ("x",)
    until(lambda: consumed(client) >= 6, "three batches are consumed")
    time.sleep(0.1)
    # One batch is yielded, two are queued, and at most one waits for room in the queue.
    assert consumed(client) <= 8
    batches.close()  # type: ignore[attr-defined]
    client.close()


def test_a_batch_is_waited_for_until_the_deadline_and_no_longer(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(3))
    impatient = stream(plane)
    batches = iter(impatient)
    next(batches)
    impatient.draws = replace(impatient.draws, timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(PlaneTimeout, match=r"Rank 0 of task 'train' got no batch.*within 0\.3 s"):
        next(batches)
    assert time.monotonic() - start > 0.25
    client.close()


def test_a_batch_that_does_not_come_says_what_is_missing(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(3))
    lack = (
        r"within 0\.2 s: 2 units with columns \['ghost'\] could not be drawn: rows that were ready: 0\. Raise timeout_s"
    )
    with pytest.raises(PlaneTimeout, match=lack):
        next(iter(stream(plane, fields=("ghost",), timeout_s=0.2)))
    client.close()


def test_the_deadline_limits_the_wait_for_a_batch_and_not_the_time_between_requests(plane: LocalPlane) -> None:
    """Drawing ahead finds no batch for longer than `timeout_s`, while nobody waits for one."""
    client = connect_blocking(plane.descriptor)
    put(client, range(3))
    slow = stream(plane)
    batches = iter(slow)
    assert next(batches)[0]["x"].tolist() == [0, 1]
    patient, slow.draws = slow.draws, replace(slow.draws, timeout_s=0.1)
    put(client, range(3, 4))  # ends the draw that is under way; the next one has the new deadline
    until(lambda: consumed(client) == 4, "two batches are consumed")
    time.sleep(0.3)
    slow.draws = patient
    put(client, range(4, 6))
    assert [next(batches)[0]["x"].tolist() for _ in range(2)] == [[2, 3], [4, 5]]
    batches.close()  # type: ignore[attr-defined]
    client.close()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_workers_of_a_loader_keep_the_order_of_turns(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    put(client, range(12))
    dataset = stream(plane, sampler=RankAware(1), turns=6)
    turns = [meta.keys for _, meta in StreamingDataLoader(dataset, num_workers=2, timeout=60)]
    assert len(turns) == 6
    assert sorted(itertools.chain(*turns)) == sorted(f"k{i}" for i in range(12))
    again = [meta.keys for _, meta in stream(plane, sampler=RankAware(1), turns=6)]
    assert turns == again
    client.close()


def test_a_lost_plane_ends_the_iteration() -> None:
    with start_local_plane(TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1)) as plane:
        batches = iter(stream(plane))
        client = connect_blocking(plane.descriptor)
        put(client, range(2))
        next(batches)
        plane.close()
        with pytest.raises(PlaneLostError):
            next(batches)
        client.close()


@pytest.mark.parametrize(
    ("name", "value"), [("count", 0), ("ahead", 0), ("rank", -1), ("turns", -1), ("timeout_s", -1.0)]
)
def test_numbers_out_of_range_are_refused(plane: LocalPlane, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        stream(plane, **{name: value})


@pytest.mark.parametrize(
    "sampler", [Sequential(), WholeGroups(Groups("uid", 2)), RankAware(2), LengthBalanced(2, "len")]
)
def test_a_rank_that_the_sampler_does_not_have_is_refused_at_once(plane: LocalPlane, sampler: Sampler) -> None:
    with pytest.raises(ConfigError, match=rf"got rank 2, and {type(sampler).__name__} makes [12]\."):
        stream(plane, sampler=sampler, rank=2)


def test_a_rank_for_which_the_sampler_makes_no_share_is_named(plane: LocalPlane) -> None:
    class Pair:
        def sample(self, ready: KVBatchMeta, count: int) -> Shares:
            return RankAware(2).sample(ready, count)

    client = connect_blocking(plane.descriptor)
    put(client, range(2))
    with pytest.raises(ConfigError, match=r"got rank 2, and Pair makes 2\."):
        next(iter(stream(plane, sampler=Pair(), rank=2)))
    client.close()


def test_the_compatible_dataset_gives_micro_batches_and_ends_when_all_is_consumed() -> None:
    sampler = tq.RankAwareSampler()
    conf = tq.init({"controller": {"sampler": sampler}, "rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}})
    try:
        jagged = torch.nested.nested_tensor([torch.arange(i + 1) for i in range(8)], layout=torch.jagged)
        tq.get_client().put(TensorDict({"x": torch.arange(8), "jag": jagged}, batch_size=[8]), partition_id="p")
        ranks = [
            tq.StreamingDataset(conf, 4, 3, ["x", "jag"], "p", "train", rank, should_check_consumption_status=True)
            for rank in (0, 1)
        ]
        loaders = [tq.StreamingDataLoader(dataset) for dataset in ranks]
        got = [[(td["x"].tolist(), [len(row) for row in td["jag"].unbind()], m.size) for td, m in loaders[0]]]
        assert [size for _, _, size in got[0]] == [3, 1, 3, 1]
        assert sorted(itertools.chain(*(xs for xs, _, _ in got[0]))) == list(range(8))
        assert all([x + 1 for x in xs] == lengths for xs, lengths, _ in got[0])
        assert list(loaders[1]) == []  # rank 0 took everything
        assert len(loaders[0].get_buffer()) == 2
        loaders[0].reset()
        assert [td["x"].tolist() for td, _ in loaders[0]] == [xs for xs, _, _ in got[0]]
        loaders[0].step("q")
        assert loaders[0].get_buffer() == []
        endless = tq.StreamingDataset(conf, 1, 1, ["x"], "empty", "train", 0, timeout_s=0.1)
        stream = iter(endless)
        with pytest.raises(tq.NotReadyError, match="empty"):
            next(stream)
    finally:
        tq.close()
