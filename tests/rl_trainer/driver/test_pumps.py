"""The two pumps with stand-in workers that name rows and compute nothing.

A call takes a drawn number of turns of the event loop, so every order of events is one that the
event loop can have, and no test waits for a clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_buffers import make_buffers, opened

from rl_protocol import BatchData, DataLostError, KVBatchMeta, RLError, RolloutError, RowKey, WorkerError, ragged
from rl_protocol.ports import SessionResult, WeightSyncReport, settle
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    PPOTrainer,
    PromptOrder,
    RolloutConfig,
    TrainerParts,
    Workers,
    build_graph,
)
from rl_trainer.checkpoints.folder import newest_whole
from rl_trainer.config import AsyncConfig, FilterGroupsConfig, ReplayConfig
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.driver.pumps import BatchQueue, GroupCounts, staleness
from rl_trainer.workers.messages import (
    FilterResult,
    RewardResult,
    RolloutCall,
    RolloutResult,
    SavedFiles,
    StageCall,
    StageResult,
)

BATCH, N = 4, 2


class World:
    """Stand-ins for all workers, and what they were told.

    Args:
        delays: turns of the event loop that calls take, one after the other.
        faults: errors by (method, number of the call from 0).
        kept: how many prompts of a round are informative; None: the run has no filter.
    """

    def __init__(self, *, bound=0, steps=4, delays=(1,), faults=None, kept=None, replay=None, folder=None, sync=True):
        self.delays, self.faults, self.kept = list(delays), dict(faults or {}), kept
        self.calls, self.turn = Counter(), 0
        self.version, self.generating = 0, 0
        self.rolled, self.trained, self.steps = [], [], []
        filtering = FilterGroupsConfig(enable=kept is not None, max_num_gen_batches=9)
        algorithm = AlgorithmConfig(filter_groups=filtering, old_log_prob="recompute")
        rollout, reward, actor = (StandIn(self, name) for name in ("rollout", "reward", "actor"))
        self.workers = Workers(rollout=[rollout], reward=reward, actor=[actor])
        self.plane = MemoryDataPlane()
        self.buffers = make_buffers(self.plane, replay)
        self.trainer = PPOTrainer(
            TrainerParts(
                graph=build_graph(algorithm, ActorConfig()),
                plane=self.plane,
                buffers=self.buffers,
                replay=replay or ReplayConfig(),
                workers=self.workers,
                weight_sync=self if sync else None,
                train_order=PromptOrder(100, BATCH, 0),
                validation_size=3,
                rollout=RolloutConfig(n=N, response_length=2, num_workers=1),
                actor=ActorConfig(),
                critic=CriticConfig(),
                filter_groups=algorithm.filter_groups,
                loop=LoopConfig(total_training_steps=steps, test_freq=2, val_before_train=False, save_freq=1),
                on_step=lambda step, metrics: self.steps.append((step, dict(metrics))),
                async_rl=AsyncConfig(max_staleness=bound),
                checkpoints=CheckpointWriter(folder, config="", keep=0, workers=self.workers, timeout_s=60)
                if folder
                else None,
            )
        )

    async def pause(self):
        for _ in range(self.delays[self.turn % len(self.delays)]):
            await asyncio.sleep(0)
        self.turn += 1

    def fit(self, resume=None):
        async def main():
            async with opened(self.buffers), asyncio.timeout(60):
                if resume is not None:
                    await self.trainer.resume(resume)
                await self.trainer.fit()
                assert asyncio.all_tasks() - {asyncio.current_task()} <= {b._listener for b in self.buffers.values()}

        asyncio.run(main())
        return self

    async def update_weights(self, version):
        await self.pause()
        assert not self.generating, "the weights change below a running generation"
        self.version = version
        return WeightSyncReport(version=version, num_bytes=1, seconds=0.0, receivers=("rollout",))

    async def rollout(self, call):
        self.generating += 1
        began = self.version
        await self.pause()
        self.generating -= 1
        leases = [prompt.lease for prompt in call.prompts]
        assert {lease.version for lease in leases} == {began} == {self.version}
        ended = [SessionResult(lease, session, rows=1) for lease in leases for session in lease.sessions]
        rows = BatchData({"responses": ragged([[3, 4]] * len(ended), "int64")})
        tags = [{"prompt_len": 1, "response_len": 2}] * len(ended)
        await settle(self.plane, ended, rows, tags=tags)
        if call.partition.name == "train":
            self.rolled += [(prompt.lease.uid, prompt.row) for prompt in call.prompts]
        return RolloutResult(tokens=2 * len(ended))

    def filter(self, call):
        uids = dict.fromkeys(RowKey.parse(key).uid for key in call.batch.keys)
        return FilterResult(uids=tuple(uids)[: self.kept])

    def update_actor(self, call):
        self.trained.append(sorted({RowKey.parse(key).uid for key in call.batch.keys}))


class StandIn:
    """A WorkerHandle that answers after `World.pause`."""

    def __init__(self, world, name):
        self.world, self.name, self.process, self.bytes_moved = world, name, self, 0

    async def call(self, method, payload, *, timeout_s):
        world = self.world
        number = world.calls[method]
        world.calls[method] += 1
        if method != "rollout":
            await world.pause()
        if error := world.faults.get((method, number)):
            raise error
        if method == "rollout":
            return msgspec.msgpack.encode(await world.rollout(msgspec.msgpack.decode(payload, type=RolloutCall)))
        kinds = {"reward": RewardResult, "evaluate": RewardResult, "finish_save": lambda: SavedFiles(files={})}
        answer = kinds.get(method, StageResult)()
        if method in ("filter", "update_actor"):
            answer = getattr(world, method)(msgspec.msgpack.decode(payload, type=StageCall)) or answer
        return msgspec.msgpack.encode(answer)


def ages(world):
    return [metrics["training/off_policy/trajectory_staleness/max"] for step, metrics in world.steps if step]


DELAYS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(bound=st.integers(0, 3), delays=DELAYS, kept=st.sampled_from([None, 2, 3]))
def test_no_schedule_exceeds_the_bound_or_loses_a_group(bound, delays, kept):
    world = World(bound=bound, steps=5, delays=delays, kept=kept).fit()
    assert max(ages(world)) <= bound
    counts = world.trainer.group_counts()
    assert (counts.trained, counts.held) == (5 * BATCH, 0)
    assert counts.finished == len(world.rolled) == counts.trained + counts.dropped
    assert counts.dropped == 0 or kept is not None
    assert [len(uids) for uids in world.trained] == [BATCH] * 5
    assert [uids[0].partition("-")[0] for uids in world.trained] == [f"s{step}" for step in range(1, 6)]
    assert not any(asyncio.run(world.plane.stats()).rows.values())


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(0, 2),
    delays=DELAYS,
    rollouts=st.sets(st.integers(0, 8), max_size=3),
    losses=st.sets(
        st.tuples(st.sampled_from(["reward", "adv", "old_log_prob", "read_ahead"]), st.integers(0, 5)), max_size=2
    ),
)
def test_failed_rollouts_and_lost_rows_lose_no_prompt(bound, delays, rollouts, losses):
    faults = {("rollout", number): WorkerError("rollout is late") for number in rollouts}
    faults |= {loss: DataLostError("a unit died") for loss in losses}
    world = World(
        bound=bound, steps=4, delays=delays, faults=faults, replay=ReplayConfig(on_failure="refill", max_attempts=9)
    )
    world.fit()
    assert max(ages(world)) <= bound
    counts = world.trainer.group_counts()
    assert (counts.trained, counts.held) == (4 * BATCH, 0)
    assert counts.finished == counts.trained + counts.dropped
    assert len({uid for uids in world.trained for uid in uids}) == 4 * BATCH
    rows = dict(world.rolled)  # a prompt that is rolled out again has the same row
    assert [rows[uid] for uids in world.trained for uid in uids] == PromptOrder(100, BATCH, 0).take(0, 4 * BATCH)
    assert not any(asyncio.run(world.plane.stats()).rows.values())


def test_one_step_off_generates_a_batch_while_it_trains_on_the_one_before():
    world = World(bound=1, delays=[3]).fit()
    assert ages(world) == [0, 1, 1, 1]
    assert all(metrics["idle/trainer/starved"] >= 0 <= metrics["idle/trainer/refit"] for step, metrics in world.steps)


def test_without_staleness_nothing_is_generated_before_the_weights_are_there():
    world = World(bound=0, delays=[3]).fit()
    assert ages(world) == [0, 0, 0, 0]
    assert not any(name.startswith("idle/") for _, metrics in world.steps for name in metrics)


def test_a_trajectory_older_than_the_bound_ends_the_run():
    """The replicas answer with a version that they should have replaced."""
    world = World(bound=1)
    generate = world.rollout

    async def stuck(call):
        prompts = [msgspec.structs.replace(p, lease=msgspec.structs.replace(p.lease, version=0)) for p in call.prompts]
        world.version, now = 0, world.version
        try:
            return await generate(msgspec.structs.replace(call, prompts=tuple(prompts)))
        finally:
            world.version = now

    world.rollout = stuck
    with pytest.raises(
        RolloutError,
        match=r"'s3-0/0/0' was generated with version 0 .* train version 2; async_rl\.max_staleness=1 allows 1",
    ):
        world.fit()
    assert len(world.trained) == 2


@pytest.mark.parametrize("method", ["rollout", "reward", "adv", "update_actor", "evaluate", "save_state"])
@pytest.mark.parametrize("number", [0, 2])
def test_an_error_in_one_pump_ends_both(tmp_path, method, number):
    number = 0 if method == "evaluate" else number
    world = World(bound=1, delays=[3, 1], faults={(method, number): RLError("broken")}, folder=tmp_path)
    with pytest.raises(RLError, match="broken") as failure:
        world.fit()
    assert any(note.startswith(("step ", "validation after step ")) for note in failure.value.__notes__)


@pytest.mark.parametrize("turns", [5, 40, 120])
def test_a_cancelled_run_leaves_no_task(turns):
    world = World(bound=1, delays=[3], steps=100)

    async def main():
        async with opened(world.buffers):
            run = asyncio.create_task(world.trainer.fit())
            for _ in range(turns):
                await asyncio.sleep(0)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            listeners = {buffer._listener for buffer in world.buffers.values()}
            assert asyncio.all_tasks() <= {asyncio.current_task(), *listeners}

    asyncio.run(main())


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_resumed_run_trains_on_every_prompt_once(tmp_path, bound):
    """The batches that were generated and not trained on are generated again."""
    first = World(bound=bound, delays=[3], steps=9, faults={("update_actor", 3): RLError("killed")}, folder=tmp_path)
    with pytest.raises(RLError, match="killed"):
        first.fit()
    kept, _ = newest_whole(tmp_path)
    assert kept is not None
    second = World(bound=bound, delays=[3], steps=6, folder=tmp_path).fit(kept)
    uids = [uid for one in (first.trained[: kept.manifest.step], second.trained) for batch in one for uid in batch]
    assert len(uids) == len(set(uids)) == 6 * BATCH
    rows = dict(first.rolled) | dict(second.rolled)
    assert [rows[uid] for uid in uids] == PromptOrder(100, BATCH, 0).take(0, 6 * BATCH)
    assert max(ages(second)) <= bound


def test_nothing_is_sampled_before_it_is_admitted_or_after_a_loss():
    async def main():
        queue = BatchQueue[str](3, 4)
        begun = asyncio.create_task(queue.begin())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not begun.done()
        await queue.admit(9)
        assert await begun == 3
        await queue.finish("three")
        assert await queue.begin() == 4
        await queue.finish(DataLostError("gone"))
        assert await queue.get(3) == "three"
        with pytest.raises(DataLostError, match="gone"):
            await queue.get(4)
        again = asyncio.create_task(queue.begin())
        async with queue.rewound(4):
            assert not again.done()
        assert await again == 4

    asyncio.run(main())


def test_counts_that_do_not_add_up_are_refused():
    GroupCounts(finished=5, trained=3, dropped=1, held=1).check()
    with pytest.raises(RLError, match=r"5 prompts finished = 3 trained \+ 1 dropped \+ 0 held does not add up"):
        GroupCounts(finished=5, trained=3, dropped=1, held=0).check()


def test_a_trajectory_without_a_version_is_refused():
    rows = KVBatchMeta(partition="train", keys=("a/0/0", "b/0/0"), tags=({"version": 2}, {"version": None}))
    assert staleness(rows.select_rows([0]), 5) == [3]
    with pytest.raises(RolloutError, match=r"'b/0/0' has no tag `version`"):
        staleness(rows, 5)
