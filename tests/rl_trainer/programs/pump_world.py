"""A trainer with stand-in workers that name rows and compute nothing, for tests of its pumps."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import ClassVar

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from replay_buffers import make_buffers, opened

from rl_protocol import BatchData, RowKey, ragged
from rl_protocol.ports import SessionResult, WeightSyncReport, settle
from rl_protocol.rl_columns import prompt_partition
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
from rl_trainer.config import AsyncConfig, FilterGroupsConfig, ReplayConfig
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.workers.messages import (
    CopyRowsCall,
    FilterResult,
    PutRowsCall,
    RewardResult,
    RolloutCall,
    RolloutResult,
    SavedFiles,
    StageCall,
    StageResult,
)
from rl_trainer.workers.saved_rows import RowFiles
from rl_trainer.workers.stateful import StatefulWorker

BATCH, N = 4, 2


class World:
    """Stand-ins for all workers, and what they were told.

    Args:
        delays: turns of the event loop that calls take, one after the other.
        faults: errors by (method, number of the call from 0).
        kept: how many prompts of a round are informative; None: the run has no filter.
        sessions: as `TrainerParts.sessions`.
        async_rl: further settings of AsyncConfig.
    """

    def __init__(
        self,
        *,
        bound=0,
        steps=4,
        delays=(1,),
        faults=None,
        kept=None,
        sessions=None,
        replay=None,
        folder=None,
        deterministic=False,
        workers=1,
        plane=None,
        keep_rows=None,
        save_freq=1,
        **async_rl,
    ):
        self.delays, self.faults, self.kept = list(delays), dict(faults or {}), kept
        self.calls, self.turn = Counter(), 0
        self.on_update, self.overtaken = async_rl.get("on_update", "finish"), 0
        self.version, self.generating, self.sampling, self.most = 0, 0, 0, 0
        self.rolled, self.trained, self.steps, self.versions, self.keys = [], [], [], {}, []
        filtering = FilterGroupsConfig(enable=kept is not None, max_num_gen_batches=9)
        algorithm = AlgorithmConfig(filter_groups=filtering, old_log_prob="recompute")
        rollout = [StandIn(self, f"rollout-{i}") for i in range(workers)]
        self.workers = Workers(rollout=rollout, reward=StandIn(self, "reward"), actor=[StandIn(self, "actor")])
        self.plane = plane or MemoryDataPlane()
        self.rows = Rows(self.plane)
        self.buffers = make_buffers(self.plane, replay, bound)
        self.trainer = PPOTrainer(
            TrainerParts(
                graph=build_graph(algorithm, ActorConfig()),
                plane=self.plane,
                buffers=self.buffers,
                replay=replay or ReplayConfig(),
                workers=self.workers,
                weight_sync=self,
                train_order=PromptOrder(100, BATCH, 0),
                sessions=sessions,
                validation_size=3,
                rollout=RolloutConfig(n=N, response_length=2, num_workers=1),
                actor=ActorConfig(),
                critic=CriticConfig(),
                filter_groups=algorithm.filter_groups,
                loop=LoopConfig(
                    total_training_steps=steps,
                    test_freq=2,
                    val_before_train=False,
                    save_freq=save_freq,
                    deterministic=deterministic,
                ),
                on_step=lambda step, metrics: self.steps.append((step, dict(metrics))),
                keep_rows=keep_rows,
                async_rl=AsyncConfig(max_staleness=bound, **async_rl),
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
                if resume is not None or self.trainer._parts.keep_rows is not None:
                    self.recovered = await self.trainer.resume(resume)
                await self.trainer.fit()
                assert asyncio.all_tasks() - {asyncio.current_task()} <= {b._listener for b in self.buffers.values()}

        asyncio.run(main())
        return self

    async def update_weights(self, version):
        await self.pause()
        if self.on_update == "finish":
            assert not self.generating, "the weights change below a running generation"
        self.version = version
        return WeightSyncReport(version=version, num_bytes=1, seconds=0.0, receivers=("rollout",))

    async def generate(self, call):
        await self.pause()

    async def rollout(self, call):
        self.generating += len(call.prompts)
        self.sampling += len(call.prompts) if call.partition.name == "train" else 0
        self.most = max(self.most, self.sampling)
        began = self.version
        try:
            await self.generate(call)
        finally:
            self.generating -= len(call.prompts)
            self.sampling -= len(call.prompts) if call.partition.name == "train" else 0
        leases = [prompt.lease for prompt in call.prompts]
        (leased,) = {lease.version for lease in leases}
        # only `finish` keeps weights from changing between the lease and the call
        assert leased == began if self.on_update == "finish" else leased <= began
        oldest = self.version if self.on_update == "abort" else began
        assert self.on_update != "finish" or began == self.version
        ended = [SessionResult(lease, session, rows=1) for lease in leases for session in lease.sessions]
        rows = BatchData({"responses": ragged([[3, 4]] * len(ended), "int64")})
        newest = {"newest_version": self.version} if self.version > oldest else {}
        tags = [{"prompt_len": 1, "response_len": 2, "version": oldest, **newest}] * len(ended)
        self.overtaken += len(leases) if self.version > leased and call.partition.name == "train" else 0
        prompts = BatchData({"prompts": ragged([[prompt.row] for prompt in call.prompts], "int64")})
        rows_of = [{"row": prompt.row} for prompt in call.prompts]
        await self.plane.put(
            prompt_partition(call.partition.name), [lease.uid for lease in leases], prompts, tags=rows_of
        )
        await settle(self.plane, ended, rows, tags=tags)
        if call.partition.name == "train":
            self.versions |= {prompt.lease.uid: prompt.lease.version for prompt in call.prompts}
            self.rolled += [(prompt.lease.uid, prompt.row) for prompt in call.prompts]
        return RolloutResult(tokens=2 * len(ended), single=True)

    def reward(self, call):
        pass

    def filter(self, call):
        uids = dict.fromkeys(RowKey.parse(key).uid for key in call.batch.keys)
        return FilterResult(uids=tuple(uids)[: self.kept])

    def update_actor(self, call):
        self.keys += call.batch.keys
        self.trained.append(sorted({RowKey.parse(key).uid for key in call.batch.keys}))


class Rows(StatefulWorker):
    """What the reward worker does for sampled batches in checkpoints."""

    handlers: ClassVar = {"copy_rows": CopyRowsCall, "put_rows": PutRowsCall, **StatefulWorker.state_handlers}

    def __init__(self, plane):
        files = RowFiles(plane)
        self.copy_rows, self.put_rows, self.writes = files.copy, files.put, files.take_writes

    def copy_state(self, part):
        return self.writes()

    def take_state(self, folder):
        pass


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
        if self.name == "reward" and method in world.rows.handlers:
            return await world.rows.handle(method, payload)
        kinds = {"reward": RewardResult, "evaluate": RewardResult, "finish_save": lambda: SavedFiles(files={})}
        answer = kinds.get(method, StageResult)()
        if method in ("reward", "filter", "update_actor"):
            answer = getattr(world, method)(msgspec.msgpack.decode(payload, type=StageCall)) or answer
        return msgspec.msgpack.encode(answer)


def ages(world):
    return [metrics["training/off_policy/trajectory_staleness/max"] for step, metrics in world.steps if step]


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def spin(self):
        """Run until every task waits."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:
                return


class HeldWorld(World):
    """A World whose calls end one by one, in any order."""

    def __init__(self, loop, **options):
        self.loop, self.held = loop, []
        super().__init__(**options)

    async def pause(self):
        ended = self.loop.create_future()
        self.held.append(ended)
        try:
            await ended
        finally:
            self.held.remove(ended)

    async def train(self):
        async with opened(self.buffers):
            await self.trainer.fit()


def play(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run this many examples of a state machine, of at most this many steps each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
