"""Faults of asynchronous training, injected between the real pumps and their workers."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from pump_world import BATCH, HeldWorld, Loop, World, ages

from rl_protocol import RLError
from rl_trainer import PromptOrder
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.config import ReplayConfig
from rl_trainer.workers.messages import RolloutResult


@pytest.mark.parametrize("inflight", [0, 3])
def test_a_prompt_that_a_worker_silently_drops_is_rolled_out_again_and_not_waited_for_for_ever(inflight):
    """The worker answers as if all were well, and has not settled the sessions of a prompt."""
    loop = Loop()
    world = HeldWorld(
        loop,
        bound=2,
        steps=3,
        replay=ReplayConfig(on_failure="refill", max_attempts=3, lease_s=60),
        max_inflight_prompts=inflight,
    )
    generate, dropped = world.rollout, []

    async def forgetful(call):
        if not dropped:
            dropped.append(call.prompts[0].lease.uid)
            call = msgspec.structs.replace(call, prompts=call.prompts[1:])
        return await generate(call) if call.prompts else RolloutResult()

    world.rollout = forgetful
    for buffer in world.buffers.values():
        buffer._clock = loop.time
    run = loop.create_task(world.train())
    loop.spin()
    while not run.done():
        if world.held:
            world.held[0].set_result(None)
        else:
            assert dict(world.buffers["train"].unsettled()).keys() == set(dropped)
            loop.now += 61
        loop.spin()
    run.result()
    loop.close()
    assert dropped[0] in world.trained[0]
    assert [len(uids) for uids in world.trained] == [BATCH] * 3


@pytest.mark.parametrize(("bound", "inflight"), [(0, 0), (2, 0), (2, 3)])
def test_a_run_that_is_restarted_again_and_again_trains_on_each_prompt_once_and_keeps_its_bound(
    tmp_path, bound, inflight
):
    """It is killed at every second step; each checkpoint is that of the step before."""
    options = {"bound": bound, "folder": tmp_path, "delays": [3, 0, 7]}
    if inflight:
        options["max_inflight_prompts"] = inflight
    rows, trained, done = {}, [], 0
    while done < 9:
        kept, _ = newest_whole(tmp_path)
        world = World(steps=9, faults={("update_actor", 2): RLError("killed")} if done < 8 else None, **options)
        if done < 8:
            with pytest.raises(RLError, match="killed"):
                world.fit(kept)
        else:
            world.fit(kept)
        rows |= dict(world.rolled)
        kept, _ = newest_whole(tmp_path)
        assert max(ages(world)) <= bound
        trained += world.trained[: kept.manifest.step - done]
        done = kept.manifest.step
    uids = [uid for batch in trained for uid in batch]
    assert len(uids) == len(set(uids)) == 9 * BATCH
    assert sorted(rows[uid] for uid in uids) == sorted(PromptOrder(100, BATCH, 0).take(0, 9 * BATCH))


@pytest.mark.parametrize("bound", [1, 3])
def test_the_last_validation_ends_with_the_run_and_nothing_is_sampled_beyond_it(bound):
    """The validation is the last to be answered; no pump waits for a version that never comes."""
    loop = Loop()
    world = HeldWorld(loop, bound=bound, steps=2)
    run = loop.create_task(world.train())
    loop.spin()
    while not run.done():
        assert world.held
        world.held[-1].set_result(None)
        loop.spin()
    run.result()
    left = asyncio.all_tasks(loop)
    loop.close()
    assert {uid.partition("-")[0] for uid, _ in world.rolled} == {"s1", "s2"}
    assert world.calls["evaluate"] == 1
    assert left == set()


@pytest.mark.parametrize("inflight", [0, 3])
def test_calls_that_are_given_up_are_aborted_before_the_weights_change_and_never_meanwhile(inflight):
    """The engine dies of an abort during an update. Leases end below calls that run, whose prompts
    another call then generates, in twelve orders of events.
    """
    aborted = []
    for seed in range(12):
        loop, draw = Loop(), random.Random(seed)
        replay = ReplayConfig(on_failure="refill", max_attempts=99, lease_s=600)
        world = HeldWorld(loop, bound=2, steps=4, replay=replay, max_inflight_prompts=inflight)
        generate, send, updating = world.rollout, world.update_weights, []

        async def fragile(call, generate=generate, updating=updating):
            try:
                return await generate(call)
            except asyncio.CancelledError:
                aborted.append(bool(updating))
                if updating:
                    updating.append("dead")
                raise

        async def sent(version, send=send, updating=updating):
            updating.append(version)
            report = await send(version)
            assert updating == [version], "the engine died of an abort while its weights changed"
            updating.clear()
            return report

        world.rollout, world.update_weights = fragile, sent
        for buffer in world.buffers.values():
            buffer._clock = loop.time
        run = loop.create_task(world.train())
        loop.spin()
        ended = 0
        while not run.done():
            if ended < 4 and draw.random() < 0.3:
                ended += 1
                loop.now += 601
            else:
                draw.choice(world.held).set_result(None)
            loop.spin()
        run.result()
        loop.close()
        assert [len(uids) for uids in world.trained] == [BATCH] * 4
    assert aborted
    assert not any(aborted)


@pytest.mark.parametrize("on_update", ["continue", "abort"])
def test_the_generation_of_a_dropped_group_is_cancelled(on_update):
    """One that would never end."""
    world = World(bound=1, delays=[1], steps=4, order="ready_first", when_stale="drop", on_update=on_update)
    generate, cancelled = world.rollout, []

    async def rollout(call):
        if call.prompts[0].lease.uid == "s1-0":
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(world.version)
        return await generate(call)

    world.rollout = rollout
    world.fit()
    assert cancelled == [1]
    counts = world.trainer.group_counts()
    assert (counts.trained, counts.dropped) == (4 * BATCH, 1)
    counts.check()


@pytest.mark.parametrize("inflight", [0, 2])
def test_training_goes_on_beside_a_validation_whose_responses_have_one_version(inflight):
    """The rollouts of the validation are answered last. The step after it is trained meanwhile, and
    its weights wait.
    """
    loop = Loop()
    world = HeldWorld(loop, bound=2, steps=4, max_inflight_prompts=inflight)
    generate, open_calls, versions = world.rollout, [], []

    async def noted(call):
        if call.partition.name != "val":
            return await generate(call)
        began, gate = world.version, loop.create_future()
        open_calls.append(gate)
        await gate
        versions.append((began, world.version))
        return await generate(call)

    world.rollout = noted
    run = loop.create_task(world.train())
    loop.spin()
    while world.held:
        world.held[0].set_result(None)
        loop.spin()
    assert not run.done()
    assert len(world.trained) == 3, "step 3 was not trained during the validation after step 2"
    assert world.version == 2
    assert [step for step, _ in world.steps] == [1]
    while not run.done():
        for gate in open_calls:
            if not gate.done():
                gate.set_result(None)
        loop.spin()
        if world.held:
            world.held[0].set_result(None)
            loop.spin()
    run.result()
    loop.close()
    assert versions[0] == (2, 2)
    assert all(began == ended for began, ended in versions)
    assert [step for step, _ in world.steps] == [1, 2, 3, 4]
    validated = {step: metrics["val-aux/version"] for step, metrics in world.steps if "val-aux/version" in metrics}
    assert validated == {2: 2.0, 4: 4.0}
