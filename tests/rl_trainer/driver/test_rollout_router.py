"""The rollout router: every prompt once, bounded loads, sticky prefixes, slow replicas."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_buffers import leased

from rl_protocol import ConfigError, KVBatchMeta, WorkerError
from rl_protocol.ports import SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptRow, RolloutWorker
from rl_trainer.config.rollout import ROUTERS
from rl_trainer.driver import stage_calls
from rl_trainer.driver.rollout_router import OVERLOAD, Router, imbalance, preferred, roll_out
from rl_trainer.workers.messages import Partition, RolloutCall, RolloutResult

WORK = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9)), max_size=60)


def call(prompts, n=2):
    partition = Partition(name="train", split="train", step=1, n=n, sampling=SamplingParams(max_new_tokens=4))
    return RolloutCall(partition=partition, prompts=leased([(f"s1-{i}", row) for i, row in enumerate(prompts)], n))


async def spread(workers, whole, policy):
    """Roll out; return the imbalance of the response tokens."""
    tokens = [0] * len(workers)

    async def send(replica, part):
        result = await stage_calls.call(workers[replica], "rollout", part, RolloutResult, 60)
        tokens[replica] += result.tokens
        return result

    results = await roll_out(len(workers), whole, policy, send)
    assert sum(result.tokens for result in results) == sum(tokens)
    return imbalance(tokens)


class Replica:
    """A replica that records its calls and answers while `free` is set."""

    def __init__(self, name, tokens=1, fails=False):
        self.name, self.bytes_moved, self.calls, self.tokens, self.fails = name, 0, [], tokens, fails
        self.running = self.most = 0
        self.free = asyncio.Event()
        self.free.set()

    async def call(self, method, payload, *, timeout_s):
        assert method == "rollout"
        message = msgspec.msgpack.decode(payload, type=RolloutCall)
        self.calls.append(message)
        self.running += 1
        self.most = max(self.most, self.running)
        await self.free.wait()
        self.running -= 1
        if self.fails:
            raise WorkerError(f"{self.name} is gone")
        count = len(message.prompts) * message.partition.n
        return msgspec.msgpack.encode(RolloutResult(tokens=count * self.tokens))

    @property
    def rows(self):
        return [ref.row for message in self.calls for ref in message.prompts]


# -- the router
@given(WORK, st.integers(1, 6))
def test_the_least_loaded_is_never_further_ahead_than_one_piece(work, replicas):
    router = Router("least_loaded", replicas)
    for _, cost in work:
        before = list(router.loads)
        assert before[router.choose("", cost)] == min(before)
    assert max(router.loads) - min(router.loads) <= max((cost for _, cost in work), default=0)


@given(WORK, st.integers(1, 6), st.sampled_from([1.0, OVERLOAD, 2.0]))
def test_a_prefix_stays_at_home_unless_that_has_too_much_to_do(work, replicas, overload):
    router = Router("prefix_sticky", replicas, overload)
    for prefix, cost in work:
        before = list(router.loads)
        most = overload * (sum(before) + cost) / replicas
        chosen = router.choose(prefix, cost)
        passed = preferred(prefix, replicas)[: preferred(prefix, replicas).index(chosen)]
        assert before[chosen] <= most
        # the first replica with room, in the order of the prefix
        assert all(before[replica] > most for replica in passed)
    total, dearest = sum(router.loads), max((cost for _, cost in work), default=0)
    assert max(router.loads) <= overload * total / replicas + dearest


@settings(max_examples=30)
@given(WORK, st.integers(2, 5), st.sampled_from(ROUTERS), st.randoms())
def test_what_is_done_is_forgotten(work, replicas, policy, rng):
    router = Router(policy, replicas)
    given_out = [(router.choose(prefix, cost), cost) for prefix, cost in work]
    rng.shuffle(given_out)
    for replica, cost in given_out:
        router.done(replica, cost)
    assert router.loads == [0] * replicas


def test_homes_are_spread_and_one_more_replica_moves_its_share_alone():
    prefixes = [f"train/{i}" for i in range(3000)]
    three, four = ({p: preferred(p, n)[0] for p in prefixes} for n in (3, 4))
    assert all(900 < count < 1100 for count in Counter(three.values()).values())
    moved = [p for p in prefixes if three[p] != four[p]]
    assert {four[p] for p in moved} == {3}
    assert 650 < len(moved) < 850


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sticky", 2), "RolloutConfig.router must be one of even, least_loaded, prefix_sticky; got 'sticky'"),
        (("even", 0), "at least 1 replica"),
        (("even", 1, 0.9), "overload of at least 1"),
    ],
)
def test_a_router_that_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Router(*arguments)


def test_imbalance_by_hand():
    assert imbalance([10, 10]) == 1.0
    assert imbalance([30, 0, 0]) == 3.0
    assert imbalance([0, 0]) == 1.0


# -- the driver's calls
@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 4), st.sampled_from(ROUTERS))
def test_every_prompt_goes_to_one_replica_once(prompts, replicas, policy):
    async def body():
        workers = [Replica(f"r{i}") for i in range(replicas)]
        await spread(workers, call(prompts), policy)
        sent = [ref.lease.uid for worker in workers for message in worker.calls for ref in message.prompts]
        assert sorted(sent) == sorted(f"s1-{i}" for i in range(len(prompts)))
        assert all(message.prompts for worker in workers for message in worker.calls)

    asyncio.run(body())


def test_a_slow_replica_is_given_less_by_the_least_loaded_alone():
    async def body(policy):
        fast, slow = Replica("fast"), Replica("slow")
        slow.free.clear()
        running = asyncio.create_task(spread([fast, slow], call(range(32)), policy))
        async with asyncio.timeout(60):
            while len(fast.rows) + len(slow.rows) < 32:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
        slow.free.set()
        uneven = await running
        return len(fast.rows), len(slow.rows), max(fast.most, slow.most), uneven

    assert asyncio.run(body("even")) == (16, 16, 1, 1.0)
    # Pieces of 4: the slow replica keeps its first one, and the idle replica gets all the others.
    assert asyncio.run(body("least_loaded")) == (28, 4, 1, 1.75)


@pytest.mark.parametrize("policy", ROUTERS)
def test_a_prompt_costs_as_much_as_it_has_sessions(policy):
    """Half of 24 prompts have one session, and half have eight."""

    async def body():
        small, large = call(range(12), n=1).prompts, call(range(12, 24), n=8).prompts
        whole = msgspec.structs.replace(call([]), prompts=(*small, *large))
        sessions = [0, 0]

        async def send(replica, part):
            sessions[replica] += sum(len(prompt.lease.sessions) for prompt in part.prompts)
            return RolloutResult()

        await roll_out(2, whole, policy, send)
        return sessions

    fewer, more = sorted(asyncio.run(body()))
    assert fewer + more == 12 * 1 + 12 * 8
    assert more - fewer <= {"even": 0, "least_loaded": 24, "prefix_sticky": 18}[policy]


def test_a_replica_has_at_most_two_pieces_at_a_time():
    async def body():
        workers = [Replica("a"), Replica("b")]
        for worker in workers:
            worker.free.clear()
        running = asyncio.create_task(spread(workers, call(range(32)), "least_loaded"))
        async with asyncio.timeout(60):
            while sum(worker.running for worker in workers) < 4:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
        for worker in workers:
            worker.free.set()
        await running
        return [worker.most for worker in workers]

    assert asyncio.run(body()) == [2, 2]


def test_the_same_prompt_goes_where_its_prefix_is():
    async def body():
        first, again = ([Replica(f"r{i}") for i in range(3)] for _ in range(2))
        await spread(first, call(range(24)), "prefix_sticky")
        # n=1, as in the greedy baseline of ReMax
        uneven = await spread(again, call(range(24), n=1), "prefix_sticky")
        assert [worker.rows for worker in again] == [worker.rows for worker in first]
        assert uneven <= OVERLOAD + 3 / 24

    asyncio.run(body())


def test_imbalance_is_of_tokens():
    async def body():
        uneven = await spread([Replica("a", tokens=3), Replica("b")], call(range(8)), "even")
        assert uneven == 1.5

    asyncio.run(body())


@pytest.mark.parametrize("policy", ROUTERS)
def test_a_replica_that_fails_ends_the_call(policy):
    async def body():
        await spread([Replica("a"), Replica("b", fails=True)], call(range(16)), policy)

    with pytest.raises(WorkerError, match="b is gone"):
        asyncio.run(body())


class Hosted:
    """A real rollout worker in this process."""

    def __init__(self, plane, rows):
        self.name, self.bytes_moved = "hosted", 0
        self._worker = RolloutWorker(plane, BigramEngine(), {"train": rows})

    async def call(self, method, payload, *, timeout_s):
        return await self._worker.handle(method, payload)


def test_what_is_generated_does_not_depend_on_who_generates_it():
    rows = [PromptRow(prompt_ids=(2 + i % 5, 3), data_source="d", ground_truth="") for i in range(10)]

    async def body(policy, replicas):
        plane = MemoryDataPlane()
        uneven = await spread([Hosted(plane, rows) for _ in range(replicas)], call(range(10)), policy)
        found = await plane.list_rows("train")
        meta = KVBatchMeta(partition="train", keys=tuple(sorted(found.keys)))
        data = await plane.get(meta, ["responses", "rollout_log_probs"])
        assert 1 <= uneven <= replicas
        return meta.keys, [data.ragged(name).row(i).tolist() for name in data.field_names for i in range(len(meta))]

    alone = asyncio.run(body("even", 1))
    assert len(alone[0]) == 20
    for policy in ROUTERS:
        assert asyncio.run(body(policy, 3)) == alone
