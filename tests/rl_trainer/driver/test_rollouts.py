"""Rollouts through replay buffers, with sessions and workers that really fail."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from replay_buffers import make_buffers, opened

from rl_protocol import ConfigError, KVBatchMeta, RolloutError, RowKey, WorkerDiedError, WorkerError
from rl_protocol.ports import SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptRow, RolloutWorker, SessionKind, Trajectory
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.config import ReplayConfig
from rl_trainer.driver.rollouts import Rollouts, join_rows
from rl_trainer.workers.messages import Partition, PromptRef

ROWS = [PromptRow(prompt_ids=(2 + i, 3), data_source="d", ground_truth="") for i in range(8)]
PROMPTS = [PromptRef(f"s1-{i}", i) for i in range(4)]
PARTITION = Partition(name="train", split="train", step=1, n=2, sampling=SamplingParams(max_new_tokens=4))


class Flaky:
    """A kind of session that fails: row of the data set -> number of sessions that fail first."""

    def __init__(self, failing):
        self.left = dict(failing)

    async def run(self, row, generate):
        place = row.prompt_ids[0] - 2
        if self.left.get(place, 0):
            self.left[place] -= 1
            raise ConnectionError(f"the environment of row {place} is gone")
        return [Trajectory.of(await generate(row.prompt_ids))]


class Hosted:
    """A rollout worker in this process. Its first `failures` calls raise `error`, or never end."""

    def __init__(self, plane, session, name="rollout-0", error=None, failures=0):
        self.name, self.bytes_moved, self.error, self.failures, self.calls = name, 0, error, failures, 0
        self.cancelled = False
        self._worker = RolloutWorker(plane, BigramEngine(), {"train": ROWS}, SessionKind(session.run))

    async def call(self, method, payload, *, timeout_s):
        self.calls += 1
        if self.calls <= self.failures:
            if self.error is not None:
                raise self.error
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return await self._worker.handle(method, payload)


def spare(drawn):
    def draw(count):
        fresh = [PromptRef(f"s1-{4 + len(drawn) + i}", (4 + len(drawn) + i) % 8) for i in range(count)]
        drawn.extend(fresh)
        return fresh

    return draw


@pytest.fixture(params=[0, 1, 3], ids=["all", "one", "three"])
def inflight(request):
    """How many prompts are generated at once."""
    return request.param


@pytest.fixture
def roll_out(inflight):
    """Return a function that rolls PROMPTS out.

    It returns the result, the prompts drawn as spares, and the rows that are left after the commit.
    """

    def run(replay, failing, workers=None):
        drawn = []

        async def main():
            plane = MemoryDataPlane()
            buffers = make_buffers(plane, replay)
            host = partial(Hosted, plane, Flaky(failing))
            hosted = workers(host) if workers else [host()]
            rollouts = Rollouts(
                plane,
                hosted,
                buffers,
                policy=StalenessPolicy(batch_size=4, max_inflight=inflight),
                replay=replay,
                router="even",
                timeout_s=60,
            )
            async with opened(buffers), asyncio.timeout(60):
                async with rollouts.committed_after("train", 1):
                    result = await rollouts.roll_out(PARTITION, PROMPTS, spare(drawn))
                    stored = set((await plane.list_rows("train")).keys)
                    assert stored == set(result.rows.keys)
                    prompts = (await plane.list_rows("train/prompts")).keys
                    assert {RowKey.parse(key).uid for key in stored} <= set(prompts)
                left = {name: count for name, count in (await plane.stats()).rows.items() if count}
                return result, drawn, left

        return asyncio.run(main())

    return run


def sessions(result):
    found = {}
    for key in result.rows.keys:
        row = RowKey.parse(key)
        found.setdefault(row.uid, []).append(row.session)
    return found


def test_without_failures_every_prompt_has_its_sessions(roll_out):
    result, drawn, left = roll_out(ReplayConfig(), {})
    assert sessions(result) == {f"s1-{i}": [0, 1] for i in range(4)}
    assert result.rows.keys == tuple(sorted(result.rows.keys))
    assert (list(result.failures), result.replaced, drawn, left) == ([], 0, [], {})


def test_fail_ends_the_run_and_names_session_and_place(roll_out):
    with pytest.raises(
        RolloutError,
        match=r"'s1-2', in attempt 1: session 0.*environment of row 2 is gone \(.*test_rollouts.py:\d+\)\. Set ",
    ):
        roll_out(ReplayConfig(on_failure="fail"), {2: 1})


def test_refill_rolls_a_prompt_out_again_as_a_whole(roll_out):
    result, drawn, left = roll_out(ReplayConfig(on_failure="refill"), {1: 1, 2: 3})
    assert sessions(result) == {"s1-0": [0, 1], "s1-1": [2, 3], "s1-2": [4, 5], "s1-3": [0, 1]}
    assert {(one.uid, one.attempt, one.sessions, one.outcome) for one in result.failures} == {
        ("s1-1", 0, 1, "retried"),
        ("s1-2", 0, 2, "retried"),
        ("s1-2", 1, 1, "retried"),
    }
    assert (result.replaced, drawn, left) == (0, [], {})


def test_refill_takes_another_prompt_after_the_last_attempt(roll_out):
    result, drawn, left = roll_out(ReplayConfig(on_failure="refill", max_attempts=2), {1: 99, 4: 1})
    assert [prompt.uid for prompt in drawn] == ["s1-4"]
    assert sessions(result) == {"s1-0": [0, 1], "s1-2": [0, 1], "s1-3": [0, 1], "s1-4": [2, 3]}
    assert [one.outcome for one in result.failures if one.uid == "s1-1"] == ["retried", "failed"]
    assert (result.replaced, left) == (1, {})


@pytest.mark.parametrize("policy", ["refill", "accept_partial"])
def test_a_rollout_that_always_fails_ends_the_run(roll_out, policy):
    with pytest.raises(RolloutError, match=r"environment of row \d is gone"):
        roll_out(ReplayConfig(on_failure=policy, max_attempts=2), dict.fromkeys(range(8), 999))


def test_accept_partial_keeps_the_sessions_that_succeeded(roll_out):
    result, drawn, left = roll_out(ReplayConfig(on_failure="accept_partial"), {1: 1, 2: 2})
    assert sessions(result) == {"s1-0": [0, 1], "s1-1": [1], "s1-2": [2, 3], "s1-3": [0, 1]}
    assert {(one.uid, one.outcome) for one in result.failures} == {("s1-1", "partial"), ("s1-2", "retried")}
    assert (result.replaced, drawn, left) == (0, [], {})


@pytest.fixture
def lost(inflight):
    """The prompts of the first call of the second worker."""
    return {"s1-1"} if inflight else {"s1-1", "s1-3"}


def test_the_prompts_of_a_worker_that_fails_are_rolled_out_again(roll_out, lost):
    def workers(host):
        return [host(), host("rollout-1", WorkerError("rollout-1 is late"), 1)]

    result, _, left = roll_out(ReplayConfig(on_failure="refill"), {}, workers)
    assert sessions(result) == {f"s1-{i}": [2, 3] if f"s1-{i}" in lost else [0, 1] for i in range(4)}
    assert {one.uid for one in result.failures} == lost
    assert all("rollout-1: rollout-1 is late" in one.reason for one in result.failures)
    assert left == {}


def test_a_worker_that_has_died_for_good_ends_the_run_and_costs_no_prompt_an_attempt(roll_out):
    """Regression: each of its prompts was given up after some attempts, for another one."""
    made = []

    def workers(host):
        made.append(host(error=WorkerDiedError("rollout-0 died"), failures=1))
        return made

    with pytest.raises(WorkerDiedError, match="rollout-0 died"):
        roll_out(ReplayConfig(on_failure="refill"), {}, workers)
    assert made[0].calls <= 3, "no call was repeated"


def test_with_fail_the_error_of_a_worker_is_the_error_of_the_run(roll_out):
    def workers(host):
        return [host(), host("rollout-1", WorkerError("rollout-1 is late"), 1)]

    with pytest.raises(WorkerError, match="rollout-1 is late"):
        roll_out(ReplayConfig(on_failure="fail"), {}, workers)


def test_a_wrong_configuration_ends_the_run_at_once(roll_out, inflight):
    made = []

    def workers(host):
        made.append(host(error=ConfigError("rollout.session must be another"), failures=9))
        return made

    with pytest.raises(ConfigError, match=r"rollout\.session must be another"):
        roll_out(ReplayConfig(on_failure="refill"), {}, workers)
    assert made[0].calls == max(inflight, 1)


def test_a_worker_that_hangs_loses_its_leases_and_its_call_is_cancelled(roll_out, lost):
    made = []

    def workers(host):
        made.extend([host(), host("rollout-1", failures=1)])
        return made

    result, _, left = roll_out(ReplayConfig(on_failure="refill", lease_s=3.0), {}, workers)
    assert sessions(result) == {f"s1-{i}": [2, 3] if f"s1-{i}" in lost else [0, 1] for i in range(4)}
    assert all("the lease of 3 s ended" in one.reason for one in result.failures)
    assert made[1].cancelled
    assert left == {}


def test_rows_of_before_and_after_a_restart_are_joined_with_the_columns_that_all_have():
    old = KVBatchMeta(partition="train", keys=("a/0/0",), tags=({"n": 1},), fields=("responses", "old_log_probs"))
    new = KVBatchMeta(partition="train", keys=("b/0/0",), tags=({"n": 2},), fields=("entropy", "responses"))
    unknown = KVBatchMeta(partition="train", keys=("c/0/0",), tags=({"n": 3},))
    assert join_rows([old, new]) == KVBatchMeta(
        partition="train", keys=("a/0/0", "b/0/0"), tags=({"n": 1}, {"n": 2}), fields=("responses",)
    )
    assert join_rows([old, unknown, new]).fields == ()
