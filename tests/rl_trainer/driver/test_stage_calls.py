"""Stage calls: mini-batches that do not depend on the number of ranks, each row once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import BatchData, BatchError, DataLostError, KVBatchMeta, WorkerError, ragged
from rl_protocol.testing.bigram_model import BigramCritic, BigramPolicy
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import (
    ActorConfig,
    ActorWorker,
    AlgorithmConfig,
    CriticConfig,
    CriticWorker,
    Workers,
    step_columns,
)
from rl_trainer.algorithms.batching import schedule_rows, split_over_ranks
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.config.optim import Schedule
from rl_trainer.driver.stage_calls import PlacedRows, StepRows, forward_calls, run_stage, update_calls
from rl_trainer.workers.messages import ReadAheadCall, StageCall, StageResult


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 50), min_size=8, max_size=40),
    st.integers(1, 4),
    st.integers(4, 12),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_shares_make_up_the_mini_batches_of_one_rank(lengths, ranks, rows, epochs, number):
    lengths = np.array(lengths)
    schedule = Schedule(epochs=epochs, mini_batch_rows=rows, seed=3)
    whole = [sorted(mini) for mini in schedule_rows(lengths, schedule, number)]
    shares = split_over_ranks(lengths, schedule, number, ranks)
    assert len(shares) == ranks
    for step, mini in enumerate(whole):
        parts = [[share.rows[place] for place in share.mini_batches[step]] for share in shares]
        assert sorted(row for part in parts for row in part) == mini
        tokens = [int(lengths[part].sum()) for part in parts]
        assert max(tokens) - min(tokens) <= lengths[mini].max()
    for share in shares:
        assert Counter(share.rows).most_common(1)[0][1] == 1
        assert {place for step in share.mini_batches for place in step} == set(range(len(share.rows)))
    if epochs == 1:
        assert sorted(row for share in shares for row in share.rows) == list(range(lengths.size))


def test_mini_batches_smaller_than_the_ranks_give_every_rank_a_row():
    shares = split_over_ranks(np.ones(9, dtype=np.int64), Schedule(epochs=1, mini_batch_rows=4, seed=3), 0, 4)
    assert [sum(map(len, step)) for step in zip(*(share.mini_batches for share in shares), strict=True)] == [3, 3, 3]
    assert sorted(len(share.rows) for share in shares) == [2, 2, 2, 3]


def test_fewer_rows_than_ranks_have_no_shares():
    with pytest.raises(BatchError, match=r"2 rows can't give each of 3 ranks one; raise PromptOrder\.batch_size"):
        split_over_ranks(np.array([3, 3]), Schedule(epochs=1, mini_batch_rows=2, seed=0), 0, 3)


class Recording:
    """A rank that records its calls."""

    def __init__(self, name):
        self.name, self.bytes_moved, self.calls = name, 0, []

    async def call(self, method, payload, *, timeout_s):
        self.calls.append(msgspec.msgpack.decode(payload, type=StageCall))
        return msgspec.msgpack.encode(StageResult(metrics={"rank": float(self.name[-1])}))


def step_rows(count):
    keys = tuple(f"p{i}/0/0" for i in range(count))
    tags = tuple({"prompt_len": 2, "response_len": 1 + i % 5} for i in range(count))
    return StepRows.of(KVBatchMeta(partition="train", keys=keys, tags=tags))


def test_every_rank_is_sent_its_own_keys_and_one_rank_all_of_them():
    rows = step_rows(12)
    assert rows.lengths.tolist() == [3 + i % 5 for i in range(12)]
    ranks = [Recording(f"r{i}") for i in range(3)]
    metrics = asyncio.run(run_stage(ranks, "old_log_prob", forward_calls("old_log_prob", 1, rows, 3), 5))
    assert metrics == {"rank": 0.0}
    asked = [rank.calls[0].batch for rank in ranks]
    assert sorted(key for batch in asked for key in batch.keys) == sorted(rows.names.keys)
    assert not any(batch.tags and any(batch.tags) for batch in asked)
    schedule = ActorConfig(ppo_mini_batch_size=4).schedule(1, 0)
    asyncio.run(run_stage(ranks, "update_actor", update_calls(1, rows, schedule, 0, 3), 5))
    for rank, share in zip(ranks, split_over_ranks(rows.lengths, schedule, 0, 3), strict=True):
        sent = rank.calls[1]
        assert sent.batch.keys == tuple(rows.names.keys[row] for row in share.rows)
        assert sent.mini_batches == share.mini_batches
    alone = Recording("r0")
    asyncio.run(run_stage([alone], "update_actor", update_calls(1, rows, schedule, 0, 1), 5))
    assert (alone.calls[0].batch.keys, alone.calls[0].mini_batches) == (rows.names.keys, None)


class OnDevice:
    """A rank that uses that much of its device and of its memory."""

    name, bytes_moved = "rank", 0

    def __init__(self, used, memory):
        devices = {"perf/mfu/actor": used, "perf/max_memory_allocated_gb": memory}
        self._result = StageResult(metrics={"actor/lr": used, **devices})

    async def call(self, method, payload, *, timeout_s):
        return msgspec.msgpack.encode(self._result)


def test_the_metrics_of_devices_are_over_all_ranks_and_others_of_the_first():
    ranks = [OnDevice(0.25, 3.0), OnDevice(0.5, 7.0), OnDevice(0.75, 5.0)]
    metrics = asyncio.run(run_stage(ranks, "update_actor", [StageCall(step=1, batch=step_rows(1).names)] * 3, 5))
    assert metrics == {"actor/lr": 0.25, "perf/mfu/actor": 0.5, "perf/max_memory_allocated_gb": 7.0}


@pytest.mark.parametrize("count", [3, 4, 5, 7, 11, 13])
@pytest.mark.parametrize("shares", [(0, 1, 2), (0, 0, 1, 1, 2, 2)], ids=["ranks", "replicas of two ranks"])
def test_rows_that_ranks_do_not_divide_are_all_computed_once(count, shares):
    rows = step_rows(count)
    ranks = [Recording(f"r{i}") for i in range(len(shares))]
    asyncio.run(run_stage(ranks, "old_log_prob", forward_calls("old_log_prob", 1, rows, len(ranks), shares), 5))
    calls = [rank.calls[0] for rank in ranks]
    parts = {share: call.batch.keys for share, call in zip(shares, calls, strict=True)}
    computed = [key for keys in parts.values() for key in keys]
    assert sorted(computed) == sorted(rows.names.keys)  # each row once, and no padding
    schedule = ActorConfig(ppo_mini_batch_size=count).schedule(1, 0)
    asyncio.run(run_stage(ranks, "update_actor", update_calls(1, rows, schedule, 0, len(ranks), shares), 5))
    trained = {share: rank.calls[1].batch.keys for share, rank in zip(shares, ranks, strict=True)}
    assert sorted(key for keys in trained.values() for key in keys) == sorted(rows.names.keys)


def test_ranks_of_one_replica_get_the_same_rows():
    rows, shares = step_rows(12), (0, 0, 1, 1)
    ranks = [Recording(f"r{i}") for i in range(4)]
    critics = [Recording(f"critic{i}") for i in range(4)]
    assert (
        Workers(rollout=[], reward=ranks[0], actor=ranks, dp_ranks=shares, critic=critics).dp_ranks_of(critics)
        == shares
    )
    assert list(Workers(rollout=[], reward=ranks[0], actor=ranks).dp_ranks_of(ranks)) == [0, 1, 2, 3]
    asyncio.run(run_stage(ranks, "old_log_prob", forward_calls("old_log_prob", 1, rows, 4, shares), 5))
    first, again, second, third = (rank.calls[0] for rank in ranks)
    assert (first.batch, second.batch) == (again.batch, third.batch)
    assert sorted(first.batch.keys + second.batch.keys) == sorted(rows.names.keys)
    schedule = ActorConfig(ppo_mini_batch_size=4).schedule(1, 0)
    asyncio.run(run_stage(ranks, "update_actor", update_calls(1, rows, schedule, 0, 4, shares), 5))
    dealt = split_over_ranks(rows.lengths, schedule, 0, 2)
    assert [rank.calls[1].mini_batches for rank in ranks] == [dealt[i].mini_batches for i in shares]
    with pytest.raises(BatchError, match="has 1 row for 2 ranks"):
        forward_calls("ref", 1, step_rows(1), 4, shares)


def test_ranks_get_the_rows_of_their_host_where_tokens_allow():
    """Eight equal rows: the even ones on host a, the odd ones on b, the last pair on none."""
    keys = tuple(f"p{i}/0/0" for i in range(8))
    names = KVBatchMeta(partition="train", keys=keys)
    nbytes = np.array([[100, 0], [0, 100]] * 3 + [[0, 0]] * 2)
    placed = PlacedRows(hosts=("a", "b"), nbytes=nbytes, slack=0.0)
    rows = StepRows(names=names, lengths=np.full(8, 5), placed=placed)
    asked = [sorted(call.batch.keys) for call in forward_calls("ref", 1, rows, 2, hosts=["b", "a"])]
    on_b, on_a = {keys[1], keys[3], keys[5]}, {keys[0], keys[2], keys[4]}
    assert on_b < set(asked[0])
    assert on_a < set(asked[1])
    schedule = ActorConfig(ppo_mini_batch_size=8).schedule(1, 0)
    trained = [set(call.batch.keys) for call in update_calls(1, rows, schedule, 0, 2, hosts=["b", "a"])]
    assert on_b < trained[0]
    assert on_a < trained[1]
    half = rows.select([0, 2, 4, 6])  # all rows that are on some host are on a
    assert {len(call.batch) for call in forward_calls("ref", 1, half, 2, hosts=["b", "a"])} == {2}


def test_rows_without_a_host_and_ranks_on_one_host_change_no_call():
    rows, schedule = step_rows(12), ActorConfig(ppo_mini_batch_size=4).schedule(1, 0)
    nbytes = np.random.default_rng(0).integers(0, 9, (12, 2))
    placed = replace(rows, placed=PlacedRows(hosts=("a", "b"), nbytes=nbytes, slack=1.0))
    for known, hosts in ((rows, ["a", "b", "b"]), (placed, ["a", "a", "a"]), (placed, [])):
        assert forward_calls("ref", 1, known, 3, hosts=hosts) == forward_calls("ref", 1, rows, 3)
        assert update_calls(1, known, schedule, 0, 3, hosts=hosts) == update_calls(1, rows, schedule, 0, 3)


def test_the_host_of_a_replica_is_that_of_the_rank_that_reads_its_rows():
    ranks = [Recording(f"r{i}") for i in range(4)]
    for rank in ranks:
        rank.process = rank
    hosts = dict(zip(ranks, "abcd", strict=True))
    workers = Workers(rollout=[], reward=ranks[0], actor=ranks, dp_ranks=(0, 0, 1, 1), hosts=hosts)
    assert workers.hosts_of(ranks) == ["a", "c"]
    assert Workers(rollout=[], reward=ranks[0], actor=ranks).hosts_of(ranks) == ["", "", "", ""]


def test_fewer_rows_than_ranks_are_refused():
    with pytest.raises(BatchError, match="has 1 row for 2 ranks"):
        forward_calls("ref", 1, step_rows(1), 2)


def test_a_worker_that_is_two_things_is_counted_once():
    actor, rollout, reward = Recording("a0"), Recording("r0"), Recording("w0")
    workers = Workers(rollout=[rollout], reward=reward, actor=[actor], ref=[actor])
    assert workers.all() == [rollout, reward, actor]


def test_a_backend_of_one_process_refuses_to_be_a_rank():
    async def body():
        plane = MemoryDataPlane()
        columns = {
            "responses": ragged([[4, 1]], "int64"),
            "response_mask": ragged([[True, True]], "bool"),
            "old_log_probs": ragged([[-1.0, -1.0]], "float32"),
            "advantages": ragged([[1.0, 1.0]], "float32"),
        }
        batch = await plane.put("train", ["p/0/0"], BatchData(columns))
        await plane.put("train/prompts", ["p"], BatchData({"prompts": ragged([[2, 3]], "int64")}))
        worker = ActorWorker(plane, step_columns(AlgorithmConfig(), ActorConfig()), BigramPolicy(), 1.0)
        with pytest.raises(WorkerError, match="BigramPolicy trains in one process"):
            await worker.run("update_actor", StageCall(step=1, batch=batch, mini_batches=((0,),)))
        worker = ActorWorker(plane, step_columns(AlgorithmConfig(), ActorConfig(use_kl_loss=True)), BigramPolicy(), 1.0)
        with pytest.raises(WorkerError, match="BigramPolicy contains no reference policy"):
            await worker.run("ref", StageCall(step=1, batch=batch))

    asyncio.run(body())


def test_the_schedule_is_that_of_the_configuration():
    assert CriticConfig(ppo_mini_batch_size=3, ppo_epochs=2).schedule(4, 7) == Schedule(
        epochs=2, mini_batch_rows=12, seed=7
    )


@pytest.mark.parametrize("error", [DataLostError, WorkerError])
def test_only_after_a_loss_of_rows_the_other_calls_are_waited_for(error):
    done = []

    async def fails():
        raise error("gone")

    async def writes():
        await asyncio.sleep(0.01)
        done.append("written")

    async def body():
        with pytest.raises(error, match="gone"):
            await gather_or_cancel(fails(), writes())
        found = list(done)
        await asyncio.sleep(0.05)
        assert done == found == (["written"] if error is DataLostError else [])

    asyncio.run(body())


def test_rows_that_were_read_ahead_are_read_once_and_used_for_that_call_alone():
    class Counting(MemoryDataPlane):
        gets = 0

        async def get(self, meta, fields=None, **kwargs):
            self.gets += 1
            return await super().get(meta, fields, **kwargs)

    async def body():
        plane = Counting()
        rows = BatchData({"responses": ragged([[4, 1], [3]], "int64")})
        batch = await plane.put("train", ["p/0/0", "p/1/0"], rows)
        await plane.put("train/prompts", ["p"], BatchData({"prompts": ragged([[2, 3]], "int64")}))
        columns = step_columns(AlgorithmConfig(adv_estimator="gae"), ActorConfig())
        worker = CriticWorker(plane, columns, BigramCritic())
        await worker.read_ahead(ReadAheadCall(stage="values", batch=batch))
        assert plane.gets == 2  # the worker's own columns and those of the prompts
        await worker.run("values", StageCall(step=1, batch=batch))
        assert plane.gets == 2
        await worker.run("values", StageCall(step=1, batch=batch))
        assert plane.gets == 4
        await worker.read_ahead(ReadAheadCall(stage="values", batch=batch))
        await worker.run("values", StageCall(step=1, batch=batch.select_rows([0])))
        assert plane.gets == 8

    asyncio.run(body())
