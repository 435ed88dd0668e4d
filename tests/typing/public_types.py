"""Types that users of the public API see. Not run: pyright checks this file (`uv run pyright`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_type

from rl_app_ppo import TrainResult, train
from rl_ckpt_engine import CheckpointEngine, CheckpointEngineRegistry
from rl_protocol import BatchData, KVBatchMeta
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, Estimator
from rl_transferqueue import BlockingPlane, PlaneDescriptor, Portal, connect, connect_blocking, tqbridge


def batches(batch: BatchData, meta: KVBatchMeta) -> None:
    """Splitting and joining keep the type."""
    assert_type(batch.chunk(2), list[BatchData])
    assert_type(BatchData.concat([batch, batch]), BatchData)
    assert_type(meta.chunk(2), list[KVBatchMeta])
    assert_type(meta.select_keys(["a"]), KVBatchMeta)


async def planes(descriptor: PlaneDescriptor, meta: KVBatchMeta) -> None:
    """The async client and its blocking counterpart return the same types."""
    client = await connect(descriptor)
    assert_type(await client.get(meta), BatchData)
    plane = connect_blocking(descriptor)
    assert_type(plane, BlockingPlane)
    assert_type(plane.get(meta), BatchData)


async def length(text: str, *, times: int = 1) -> int:
    """A coroutine function."""
    return len(text) * times


def portals(portal: Portal) -> None:
    """`blocking` keeps parameters and result; `run` returns the result."""
    assert_type(portal.blocking(length)("a", times=2), int)
    assert_type(portal.run(length("a")), int)


class Worker:
    """Methods whose columns move by the data plane."""

    @tqbridge(reads=("responses",), writes=("score",))
    def score(self, batch: BatchData, *, scale: float = 1.0) -> BatchData:
        """Return the columns to write."""
        return batch

    @tqbridge(reads=("responses",), writes=("values",))
    async def values(self, batch: BatchData) -> BatchData:
        """Return the columns to write, asynchronously."""
        return batch

    @tqbridge(reads=("responses",))
    def longest(self, batch: BatchData) -> int:
        """Return a number."""
        return len(batch)


async def decorators(worker: Worker, meta: KVBatchMeta) -> None:
    """A decorated method takes names; it returns names if it writes, else its own result."""
    assert_type(worker.score(meta, scale=2.0), KVBatchMeta)
    assert_type(await worker.values(meta), KVBatchMeta)
    assert_type(worker.longest(meta), int)


@CheckpointEngineRegistry.register("typed")
class TypedEngine(CheckpointEngine):
    """A decorated class stays that class."""


assert_type(TypedEngine, type[TypedEngine])
assert_type(ADVANTAGE_ESTIMATORS.get("grpo"), Estimator)
_register: Callable[[type[TypedEngine]], type[TypedEngine]] = CheckpointEngineRegistry.register("again")


def runs(score: Callable[[str, str, str, object], float]) -> None:
    """Models, data, rewards and settings have several forms; the result has one."""
    assert_type(train("model", ["a.jsonl"], score, rollout={"n": 4}), TrainResult)
    assert_type(train(train_dataset=[{"prompt": "1+2="}], reward=["math", score], options=["rollout.n=4"]), TrainResult)
