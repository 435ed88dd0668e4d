"""The two pumps with stand-in workers that name rows and compute nothing.

A call takes a drawn number of turns of the event loop, so every order of events is one that the
event loop can have, and no test waits for a clock.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pump_world import BATCH, World, ages
from replay_buffers import opened

from rl_protocol import DataLostError, KVBatchMeta, RLError, RolloutError, RowKey, WorkerError
from rl_trainer import (
    PromptOrder,
)
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.config import ReplayConfig
from rl_trainer.config.async_rl import ON_UPDATE
from rl_trainer.driver.batch_queue import BatchQueue, GroupCounts, Staleness
from rl_trainer.driver.idle import IdleClock
from rl_trainer.workers.messages import RewardResult

DELAYS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(0, 3),
    depth=st.integers(0, 3),
    inflight=st.integers(0, 6),
    delays=DELAYS,
    kept=st.sampled_from([None, 2, 3]),
)
def test_no_schedule_exceeds_the_bound_or_loses_a_group(bound, depth, inflight, delays, kept):
    depth = min(depth, bound)
    world = World(bound=bound, steps=5, delays=delays, kept=kept, depth=depth, max_inflight_prompts=inflight).fit()
    assert max(ages(world)) <= (depth or bound)
    assert world.most <= (inflight or (1 + (depth or bound)) * BATCH)
    counts = world.trainer.group_counts()
    assert (counts.trained, counts.held) == (5 * BATCH, 0)
    assert counts.finished == len(world.rolled) == counts.trained + counts.dropped
    assert counts.dropped == 0 or kept is not None
    assert [len(uids) for uids in world.trained] == [BATCH] * 5
    assert [uids[0].partition("-")[0] for uids in world.trained] == [f"s{step}" for step in range(1, 6)]
    assert not any(asyncio.run(world.plane.stats()).rows.values())


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(1, 3),
    depth=st.integers(0, 3),
    inflight=st.integers(0, 6),
    delays=st.lists(st.sampled_from([0, 1, 5, 200]), min_size=1, max_size=30),
    kept=st.sampled_from([None, 1]),
    on_update=st.sampled_from(ON_UPDATE),
    when_stale=st.sampled_from(["wait", "drop"]),
)
def test_groups_that_overtake_others_break_no_bound_and_lose_none(
    bound, depth, inflight, delays, kept, on_update, when_stale
):
    options = {"depth": min(depth, bound), "max_inflight_prompts": inflight, "on_update": on_update}
    world = World(
        bound=bound, steps=5, delays=delays, kept=kept, order="ready_first", when_stale=when_stale, **options
    ).fit()
    assert max(m["training/off_policy/trajectory_staleness_worst/max"] for _, m in world.steps) <= bound
    counts = world.trainer.group_counts()
    counts.check()
    assert (counts.trained, counts.held) == (5 * BATCH, 0)
    assert counts.dropped == 0 or when_stale == "drop"
    totals = {name: sum(m[f"async/{name}"] for _, m in world.steps) for name in ("admitted", "dropped", "refilled")}
    assert totals == {"admitted": counts.finished, "dropped": counts.dropped, "refilled": counts.dropped}
    assert not any(asyncio.run(world.plane.stats()).rows.values())


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(0, 2),
    inflight=st.integers(0, 5),
    delays=DELAYS,
    rollouts=st.sets(st.integers(0, 8), max_size=3),
    losses=st.sets(
        st.tuples(st.sampled_from(["reward", "adv", "old_log_prob", "read_ahead"]), st.integers(0, 5)), max_size=2
    ),
)
def test_failed_rollouts_and_lost_rows_lose_no_prompt(bound, inflight, delays, rollouts, losses):
    faults = {("rollout", number): WorkerError("rollout is late") for number in rollouts}
    faults |= {loss: DataLostError("a unit died") for loss in losses}
    world = World(
        bound=bound,
        steps=4,
        delays=delays,
        faults=faults,
        replay=ReplayConfig(on_failure="refill", max_attempts=9),
        max_inflight_prompts=inflight,
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


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(0, 3),
    inflight=st.integers(0, 3),
    workers=st.integers(1, 3),
    delays=DELAYS,
    kept=st.sampled_from([None, 2]),
)
def test_a_deterministic_run_does_not_depend_on_delays_or_workers(bound, inflight, workers, delays, kept):
    """Each group has the prompt, the version and the step that it has without any delay."""

    def outcome(**more):
        world = World(bound=bound, steps=5, kept=kept, deterministic=True, **more).fit()
        return world.versions, dict(world.rolled), world.trained

    expected = outcome(delays=[0])
    assert outcome(delays=delays, workers=workers, max_inflight_prompts=inflight) == expected
    versions, _, trained = expected
    for step, uids in enumerate(trained, start=1):
        assert {versions[uid] for uid in uids} == {max(0, step - 1 - bound)}


@pytest.mark.parametrize("saves", [False, True], ids=["", "checkpoints wait for prompts between steps"])
def test_metrics_tell_how_far_sampling_is_ahead(saves, tmp_path):
    world = World(
        bound=2, delays=[2], kept=2, steps=5, max_inflight_prompts=1 if saves else 3, folder=tmp_path if saves else None
    ).fit()
    steps = [metrics for step, metrics in world.steps if step]
    counts = world.trainer.group_counts()
    total = {name: sum(m[f"async/{name}"] for m in steps) for name in ("admitted", "refilled", "dropped")}
    assert total["admitted"] == counts.finished == len({uid for uid, _ in world.rolled})
    assert total["dropped"] == counts.dropped
    assert total["refilled"] == counts.finished - 5 * BATCH > 0
    found = [
        m[f"async/{place}_staleness/max"]
        for m in steps
        for place in ("in_flight", "in_queue")
        if f"async/{place}_staleness/max" in m
    ]
    assert found
    assert 0 < max(found) <= 2


def test_one_step_off_generates_a_batch_while_it_trains_on_the_one_before():
    world = World(bound=1, delays=[3]).fit()
    assert ages(world) == [0, 1, 1, 1]


def test_the_weights_do_not_change_below_prompts_that_take_longer_than_the_training():
    world = World(bound=2, delays=[0], max_inflight_prompts=3, steps=5)
    generate = world.rollout

    async def slow(call):
        world.generating += 1
        for _ in range(60):
            await asyncio.sleep(0)
        world.generating -= 1
        return await generate(call)

    world.rollout = slow
    world.fit()
    assert world.version == 5


@pytest.mark.parametrize(("inflight", "calls"), [(2, BATCH), (0, 1)])
def test_prompts_of_later_steps_start_while_one_of_an_earlier_step_still_runs(inflight, calls):
    """The slowest call of step 1 takes longer than all of step 2, in so many calls."""
    world = World(bound=2, delays=[0], max_inflight_prompts=inflight, steps=3)
    ended, generate, second = [], world.rollout, asyncio.Event()

    async def rollout(call):
        uid = call.prompts[0].lease.uid
        if uid == "s1-0":
            await second.wait()
        answer = await generate(call)
        ended.append(uid)
        if len([one for one in ended if one.startswith("s2")]) == calls:
            second.set()
        return answer

    world.rollout = rollout
    world.fit()
    before = ended[: ended.index("s1-0")]
    assert len([one for one in before if one.startswith("s2")]) == calls
    assert [uids[0].partition("-")[0] for uids in world.trained] == ["s1", "s2", "s3"]


def test_a_step_trains_on_what_is_ready_first():
    """The slowest prompt ends when two steps are trained; with in_order the first waits for it."""
    world = World(bound=3, depth=1, delays=[0], order="ready_first", on_update="continue", max_inflight_prompts=3)
    two_trained, update = asyncio.Event(), world.update_actor

    async def generate(call):
        if call.prompts[0].lease.uid == "s1-0":
            await two_trained.wait()

    def count(call):
        update(call)
        if len(world.trained) == 2:
            two_trained.set()

    world.generate, world.update_actor = generate, count
    world.fit()
    assert world.trained[0] == ["s2-0", "s3-0", "s4-0", "s5-0"]
    assert "s1-0" in (*world.trained[2], *world.trained[3])
    counts = world.trainer.group_counts()
    assert (counts.finished, counts.dropped) == (4 * BATCH, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # one prompt is a turn, and goes to one of two replicas
        ({"workers": 2, "bound": 1, "order": "ready_first", "on_update": "continue"}, 1.0),
        # 4 prompts on 4 replicas, of which 3 are informative, and then 2 on two of them: 2, 2, 1, 1
        ({"workers": 4, "kept": 3}, 2 / 1.5),
    ],
    ids=["ready first", "two rounds"],
)
def test_imbalance_is_that_of_all_responses_of_a_step(options, expected):
    world = World(delays=[0], **options).fit()
    assert [m["rollout/imbalance"] for step, m in world.steps if step] == pytest.approx([expected] * 4)


@pytest.mark.parametrize(
    ("options", "solved", "expected"),
    [
        # of 4 and then 2 prompts of a step, the first is solved: 1 of 1 + 5 * 3 responses
        ({"kept": 3}, r"s\d+-0", 1 / 16),
        # each prompt is a turn, and every other one is solved: 2 of 2 + 2 * 3
        ({"bound": 1, "order": "ready_first", "on_update": "continue"}, r"s\d*[13579]-0", 2 / 8),
    ],
    ids=["two rounds", "ready first"],
)
def test_means_are_joined_by_the_numbers_that_they_are_of(options, solved, expected):
    """The source has one response to a prompt that is solved, and three to another one."""

    def reward(call):
        uids = {RowKey.parse(key).uid for key in call.batch.keys}
        scores = [score for uid in uids for score in ([1.0] if re.fullmatch(solved, uid) else [0.0] * 3)]
        name = "source/a/score/mean"
        return RewardResult(metrics={name: sum(scores) / len(scores)}, sizes={name: len(scores)})

    world = World(delays=[0], **options)
    world.reward = reward
    world.fit()
    assert [m["source/a/score/mean"] for step, m in world.steps if step] == pytest.approx([expected] * 4)


def test_a_session_without_a_score_is_one_failure():
    """The reward function fails on the session s1-0/0, which has two trajectories."""
    world = World(delays=[0])

    def reward(call):
        failed = ("s1-0/0/0", "s1-0/0/1") if call.step == 1 else ()
        return RewardResult(metrics={"reward/failures/exception": float(bool(failed))}, failed=failed)

    world.reward = reward
    world.fit()
    found = [(m["reward/failures"], m["reward/failures/exception"]) for step, m in world.steps if step]
    assert found == [(1, 1), (0, 0), (0, 0), (0, 0)]


def test_a_group_that_gets_too_old_is_dropped_and_its_prompt_generated_again():
    """Its replica generates it to the end, and what it hands over then is refused."""
    world = World(
        bound=1, delays=[0], order="ready_first", when_stale="drop", on_update="continue", max_inflight_prompts=3
    )
    again, rollout, calls = asyncio.Event(), world.rollout, []

    async def generate(call):
        uid = call.prompts[0].lease.uid
        if uid == "s1-0":
            await again.wait()
        elif uid == "s1-1":
            again.set()
            await calls[0]

    async def to_the_end(call):
        calls.append(asyncio.create_task(rollout(call)))
        return await asyncio.shield(calls[-1])

    world.generate, world.rollout = generate, to_the_end
    world.fit()
    assert ages(world) == [0, 1, 1, 1]
    rows, trained = dict(world.rolled), [uid for uids in world.trained for uid in uids]
    assert rows["s1-0"] == rows["s1-1"]
    assert "s1-0" not in trained
    assert "s1-1" in trained
    counts = world.trainer.group_counts()
    assert (counts.finished, counts.trained, counts.dropped, counts.held) == (17, 16, 1, 0)
    totals = {name: sum(m[f"async/{name}"] for _, m in world.steps) for name in ("admitted", "dropped", "refilled")}
    assert totals == {"admitted": 17, "dropped": 1, "refilled": 1}
    assert not any(asyncio.run(world.plane.stats()).rows.values())


def test_without_staleness_nothing_is_generated_before_the_weights_are_there():
    world = World(bound=0, delays=[3]).fit()
    assert ages(world) == [0, 0, 0, 0]


def test_a_synchronous_step_says_how_long_each_role_was_idle_and_why(monkeypatch):
    """Every call of a worker, and every update of the weights, takes a second."""
    now = 0.0
    monkeypatch.setattr("rl_trainer.driver.trainer.IdleClock", lambda: IdleClock(lambda: now))
    world = World(bound=0, delays=[0])
    pause = world.pause

    async def second():
        nonlocal now
        now += 1
        await pause()

    world.pause = second
    world.fit()
    idle = [
        {k.removeprefix("idle/"): v for k, v in metrics.items() if k.startswith("idle/")} for _, metrics in world.steps
    ]
    # rollout and reward; old_log_prob; adv; read_ahead and update_actor; the weights
    synchronous = {
        "rollout/starved": 5, "trainer/starved": 3, "reward/starved": 4,
        "rollout/refit": 1, "trainer/refit": 1, "reward/refit": 1,
        "rollout/validation": 0, "trainer/validation": 0, "reward/validation": 0,
    }  # fmt: skip
    assert idle[0] == synchronous
    validated = synchronous | {"rollout/validation": 1, "trainer/validation": 2, "reward/validation": 1}
    assert idle[1] == validated


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
        match=r"'s3-0/0/0' was generated with version 0 .* train version 2; AsyncConfig\.max_staleness=1 allows 1",
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


def only(turn):
    return lambda ready: [turn] if turn in ready else None


def test_nothing_is_sampled_before_it_is_admitted_or_after_a_loss():
    async def main():
        queue = BatchQueue[str](3, 4, 60)
        begun = asyncio.create_task(queue.begin())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not begun.done()
        await queue.admit(9)
        assert await begun == 3
        await queue.finish(3, "three")
        assert await queue.begin() == 4
        await queue.finish(4, DataLostError("gone"))
        assert await queue.get(3, only(3)) == {3: "three"}
        with pytest.raises(DataLostError, match="gone"):
            await queue.get(4, only(4))
        again = asyncio.create_task(queue.begin())
        async with queue.rewound():
            assert not again.done()
        assert await again == 4

    asyncio.run(main())


def test_turns_that_are_taken_back_or_rewound_are_sampled_before_those_that_follow():
    async def main():
        queue = BatchQueue[str](4, 9, 60, ready={2: "two", 3: "three"})
        await queue.admit(6)
        for turn in (4, 5):
            assert await queue.begin() == turn
            await queue.finish(turn, f"turn {turn}")
        assert queue.withdraw([4]) == {4: "turn 4"}
        await queue.repeat([4])
        assert await queue.begin() == 4
        assert queue.sampling == {4}
        await queue.finish(4, "again")
        assert await queue.get(1, lambda ready: [3, 4] if 4 in ready else None) == {3: "three", 4: "again"}
        async with queue.rewound():
            assert queue.waiting() == {}
        assert [await queue.begin() for _ in range(5)] == [2, 3, 4, 5, 6]

    asyncio.run(main())


def test_counts_that_do_not_add_up_are_refused():
    GroupCounts(finished=5, trained=3, dropped=1, held=1).check()
    with pytest.raises(RLError, match=r"5 prompts finished = 3 trained \+ 1 dropped \+ 0 held does not add up"):
        GroupCounts(finished=5, trained=3, dropped=1, held=0).check()


def test_staleness_is_that_of_the_oldest_and_of_the_newest_token():
    tags = ({"version": 2}, {"version": 1, "newest_version": 4}, {"version": None})
    rows = KVBatchMeta(partition="train", keys=("a/0/0", "b/0/0", "c/0/0"), tags=tags)
    ages = Staleness.of(rows.select_rows([0, 1]), 5)
    assert (ages.oldest, ages.newest) == ([3, 4], [3, 1])
    found = {name.rpartition("off_policy/")[2]: value for name, value in ages.metrics().items()}
    assert (found["trajectory_spans/min"], found["trajectory_spans/max"]) == (1, 4)
    assert (found["trajectory_staleness/mean"], found["trajectory_staleness_worst/max"]) == (2, 4)
    with pytest.raises(RolloutError, match=r"'c/0/0' has no tag `version`"):
        Staleness.of(rows, 5)
