"""Workers that hold a model: the ranks of one replica of it read and write rows once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rl_protocol import BatchData, DataLostError, KVBatchMeta, ragged
from rl_protocol.testing.bigram_model import BigramCritic, BigramPolicy
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, ActorWorker, AlgorithmConfig, CriticWorker, ReferenceWorker, step_columns
from rl_trainer.workers.messages import ReadAheadCall, StageCall


class Group:
    """Ranks of one replica, each a worker of this process; `rank(0)` is the leader."""

    def __init__(self, size):
        self._barrier, self._message = threading.Barrier(size, timeout=60), b""

    def rank(self, number):
        group = self

        class Rank:
            leader = number == 0

            def share(self, message):
                if self.leader:
                    group._message = message
                group._barrier.wait()
                shared = group._message
                group._barrier.wait()
                return shared

        return Rank()


class CountingPlane(MemoryDataPlane):
    def __init__(self):
        super().__init__()
        self.calls, self.lost = [], False

    async def get(self, meta, fields=None, **kwargs):
        self.calls.append("get")
        if self.lost:
            raise DataLostError("rows were lost with a storage unit")
        return await super().get(meta, fields, **kwargs)

    async def put(self, *args, **kwargs):
        self.calls.append("put")
        return await super().put(*args, **kwargs)


class Keeping(BigramPolicy):
    """A policy that keeps the columns of its updates."""

    def update(self, batch, *, temperature):
        self.batch = batch
        return {}


def test_an_update_interpolates_by_the_versions_of_its_rows():
    """Version 3 is trained on: one response of versions 3 and 1, one of version 2."""
    columns = {
        "responses": ragged([[4, 4, 1], [3]], "int64"),
        "response_mask": ragged([[True] * 3, [True]], "bool"),
        "rollout_log_probs": ragged([[-1.0] * 3, [-2.0]], "float32"),
        "rollout_versions": ragged([[[3, 1], [1, 2]], [[2, 1]]], "int32"),
        "advantages": ragged([[1.0] * 3, [1.0]], "float32"),
    }

    async def body():
        plane, policy = MemoryDataPlane(), Keeping()
        batch = await plane.put("train", ["p/0/0", "p/1/0"], BatchData(columns))
        await plane.put("train/prompts", ["p"], BatchData({"prompts": ragged([[2, 3]], "int64")}))
        settings = step_columns(AlgorithmConfig(old_log_prob="interpolate"), ActorConfig())
        await ActorWorker(plane, settings, policy, 1.0).run("update_actor", StageCall(step=4, batch=batch, updates=3))
        return policy.batch

    batch = asyncio.run(body())
    assert [row.tolist() for row in batch.ragged("interpolation").rows()] == [[0.0, 0.5, 0.5], [0.0]]
    assert batch.ragged("old_log_probs").values.tolist() == [-1.0, -1.0, -1.0, -2.0]


@pytest.mark.parametrize("mini_batches", [None, ((1, 0),)])
@pytest.mark.parametrize(
    ("kind", "backend", "more", "stage"),
    [(ActorWorker, BigramPolicy, (1.0,), "update_actor"), (CriticWorker, BigramCritic, (), "update_critic")],
)
def test_a_meter_is_given_the_update_and_the_tokens_of_its_rows(kind, backend, more, stage, mini_batches):
    metered = []

    class Model(backend):
        def update(self, batch, **_):
            return {"updated": 1.0}

        def update_local(self, batch, mini_batches, **_):
            return {"updated": 2.0}

    def meter(update, lengths):
        metered.append(lengths.tolist())
        return update() | {"measured": 3.0}

    async def body():
        plane, _ = await two_trajectories()
        columns = {
            "responses": ragged([[4, 4, 1], [3]], "int64"),
            **{name: ragged([[True] * 3, [True]], "bool") for name in ("response_mask", "loss_mask")},
            **{
                name: ragged([[0.0] * 3, [0.0]], "float32")
                for name in ("old_log_probs", "advantages", "values", "returns")
            },
        }
        batch = await plane.put("train", ["p/0/0", "p/1/0"], BatchData(columns))
        settings = step_columns(AlgorithmConfig(adv_estimator="gae"), ActorConfig())
        worker = kind(plane, settings, Model(), *more, meter=meter)
        return await worker.run(stage, StageCall(step=1, batch=batch, mini_batches=mini_batches))

    result = asyncio.run(body())
    assert result.metrics == {"updated": 1.0 if mini_batches is None else 2.0, "measured": 3.0}
    assert metered == [[5, 3]]


async def two_trajectories():
    """Yield a plane with the tokens of two responses to one prompt, and their names."""
    plane = CountingPlane()
    rows = BatchData({"responses": ragged([[4, 1], [3]], "int64")})
    batch = await plane.put("train", ["p/0/0", "p/1/0"], rows)
    await plane.put("train/prompts", ["p"], BatchData({"prompts": ragged([[2, 3]], "int64")}))
    plane.calls.clear()
    return plane, KVBatchMeta(partition="train", keys=batch.keys)


def ranks(kind, backend, plane, *more):
    """Two workers, whose backends are the ranks of one replica, and what each backend is given."""
    group, seen = Group(2), []
    columns = step_columns(AlgorithmConfig(adv_estimator="gae"), ActorConfig(use_kl_loss=True))

    def rank(number):
        class Rank(backend):
            replicas = group.rank(number)

            def compute_log_probs(self, batch, *, temperature):
                seen.append(batch)
                return super().compute_log_probs(batch, temperature=temperature)

            def compute_values(self, batch):
                seen.append(batch)
                return super().compute_values(batch)

        return kind(plane, columns, Rank(), *more)

    return [rank(0), rank(1)], seen


@pytest.mark.parametrize(
    ("kind", "backend", "more", "stage", "column"),
    [
        (ActorWorker, BigramPolicy, (1.0,), "old_log_prob", "old_log_probs"),
        (ReferenceWorker, BigramPolicy, (1.0,), "ref", "ref_log_prob"),
        (CriticWorker, BigramCritic, (), "values", "values"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_one_rank_fetches_and_writes_and_all_compute(kind, backend, more, stage, column, ahead):
    async def body():
        plane, batch = await two_trajectories()
        workers, seen = ranks(kind, backend, plane, *more)
        if ahead:
            await asyncio.gather(*(worker.read_ahead(ReadAheadCall(stage=stage, batch=batch)) for worker in workers))
        calls = [worker.run(stage, StageCall(step=1, batch=batch)) for worker in workers]
        assert [rows.keys for rows in await asyncio.gather(*calls)] == [batch.keys] * 2
        assert plane.calls == ["get", "get", "put"]  # trajectories and prompts
        first, second = seen
        assert first.field_names == second.field_names == ("prompts", "responses")
        assert all(first.ragged(name).values.tolist() == second.ragged(name).values.tolist() for name in first.columns)
        assert (await plane.list_rows("train", fields=[column])).keys == batch.keys

    asyncio.run(body())


def test_a_loss_of_rows_is_a_loss_on_every_rank():
    """The driver repeats a step after a DataLostError, from whichever rank it comes first."""

    async def body():
        plane, batch = await two_trajectories()
        workers, _ = ranks(CriticWorker, BigramCritic, plane)
        plane.lost = True
        calls = [worker.run("values", StageCall(step=1, batch=batch)) for worker in workers]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [DataLostError, DataLostError]
        assert "leader" in str(errors[1])
        assert plane.calls == ["get"]
        plane.lost = False
        calls = [worker.run("values", StageCall(step=1, batch=batch)) for worker in workers]
        assert [rows.keys for rows in await asyncio.gather(*calls)] == [batch.keys] * 2

    asyncio.run(body())
