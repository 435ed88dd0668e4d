"""Which stages run at the same time, and what their calls say about it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rl_protocol import KVBatchMeta
from rl_trainer.driver.stage_runner import Clock, ModelStage, StageRunner
from rl_trainer.workers.messages import StageCall, StageResult


class Rank:
    """A rank that records, per stage, how many processes its call says compute beside it."""

    def __init__(self, name, process=None):
        self.name, self.bytes_moved, self.process, self.beside = name, 0, process or self, {}

    async def call(self, method, payload, *, timeout_s):
        if method != "read_ahead":
            self.beside[method] = msgspec.msgpack.decode(payload, type=StageCall).side_by_side
        return msgspec.msgpack.encode(StageResult())


def stage(name, ranks):
    batch = KVBatchMeta(partition="train", keys=("p/0/0",))
    return ModelStage(name, ranks, [StageCall(step=1, batch=batch)] * len(ranks))


@pytest.mark.parametrize("work", ["forward", "update"])
def test_a_call_says_how_many_processes_compute_at_the_same_time(work):
    actor, ref, critic = [Rank("actor"), Rank("actor-1")], [Rank("ref"), Rank("ref-1")], [Rank("critic")]
    run = getattr(StageRunner(60), work)
    asyncio.run(run(Clock(), [stage("alone", actor)]))
    asyncio.run(run(Clock(), [stage("old_log_prob", actor), stage("after", actor), stage("ref", ref)]))
    asyncio.run(run(Clock(), [stage("update_critic", critic), stage("update_actor", actor)]))
    assert actor[0].beside == actor[1].beside == {"alone": 2, "old_log_prob": 4, "after": 4, "update_actor": 3}
    assert ref[0].beside == {"ref": 4}
    assert critic[0].beside == {"update_critic": 3}


def test_workers_of_one_process_compute_in_turn():
    running, most = set(), 0

    class Busy(Rank):
        async def call(self, method, payload, *, timeout_s):
            nonlocal most
            running.add(self.process)
            most = max(most, len(running))
            await asyncio.sleep(0)
            busy.append((self.process, method))
            running.discard(self.process)
            return await super().call(method, payload, timeout_s=timeout_s)

    busy = []
    actor, ref, critic = Busy("actor", "one"), Busy("ref", "one"), Busy("critic", "two")
    stages = [stage("old_log_prob", [actor]), stage("ref", [ref]), stage("values", [critic])]
    asyncio.run(StageRunner(60).forward(Clock(), stages))
    assert [method for process, method in busy if process == "one"] == ["old_log_prob", "ref"]
    assert most == 2
    assert actor.beside | ref.beside | critic.beside == {"old_log_prob": 2, "ref": 2, "values": 2}
