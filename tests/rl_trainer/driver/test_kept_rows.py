"""A restarted run trains on the rows that survived in its data plane, without generating again."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pump_world import BATCH, N, World
from replay_buffers import opened

from rl_protocol import ConfigError, DataLostError, RolloutError, RowKey
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.config import ReplayConfig
from rl_trainer.driver.trainer_parts import KeepRows

STEPS = 8
RUN = KeepRows(run="a", settings="1")


class MortalWorld(World):
    """A World that is cancelled, as if all of its processes were killed, at its `end`-th pause."""

    def __init__(self, *, end=None, **options):
        super().__init__(steps=STEPS, **options)
        self.end = end

    async def pause(self):
        if self.turn == self.end:
            self.main.cancel()
        await super().pause()

    async def live(self, checkpoint):
        """Train from a checkpoint or the beginning; returns whether it came to the end."""
        with ThreadPoolExecutor() as threads:  # a thread that publishes a checkpoint can't be cancelled
            asyncio.get_running_loop().set_default_executor(threads)
            self.main = asyncio.create_task(self._train(checkpoint))
            await asyncio.wait([self.main])
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if not self.main.cancelled():
            self.main.result()
        return not self.main.cancelled()

    async def _train(self, checkpoint):
        async with opened(self.buffers), asyncio.timeout(60):
            self.recovered = await self.trainer.resume(checkpoint)
            await self.trainer.fit()

    async def left(self):
        """Names of the training rows that are still there."""
        parts = ("train", "train/groups", "train/settled", "train/prompts")
        return [key for part in parts for key in (await self.plane.list_rows(part)).keys]


async def lives(folder, ends, owners=(), **options):
    """The worlds of a run that is killed at each of these pauses, counted from its last start.

    Returns them with the step of the checkpoint that each has started from. `owners` has the
    KeepRows of each, RUN for the rest.
    """
    worlds, plane, keep_rows = [], None, iter(owners)
    for end in [*ends, None]:
        found, _ = newest_whole(folder)
        world = MortalWorld(end=end, plane=plane, folder=folder, keep_rows=next(keep_rows, RUN), **options)
        worlds.append((found.manifest.step if found else 0, world))
        if await world.live(found):
            break
        plane = world.plane
    return worlds


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(0, 2),
    deterministic=st.booleans(),
    save_freq=st.integers(2, 5),
    ends=st.lists(st.integers(0, 90), max_size=3),
    informative=st.sampled_from([None, 2]),
    inflight=st.integers(0, 3),
    delays=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    sessions=st.sampled_from([None, lambda row: 1 if row % 2 else N]),
)
def test_a_killed_run_trains_the_same_batches_and_generates_no_finished_prompt_again(
    tmp_path_factory, bound, deterministic, save_freq, ends, informative, inflight, delays, sessions
):
    # rounds of several steps at once draw prompts in the order of their delays: runs refuse that
    assume(deterministic or not bound or informative is None)
    options = {"bound": bound, "deterministic": deterministic, "save_freq": save_freq, "delays": delays}
    options |= {"kept": informative, "max_inflight_prompts": inflight if bound else 0, "sessions": sessions}
    straight = World(steps=STEPS, **options).fit()

    async def check():
        worlds = await lives(tmp_path_factory.mktemp("run"), ends, **options)
        done = {}
        for start, world in worlds:
            for step, batch in enumerate(world.trained, start + 1):
                assert done.setdefault(step, batch) == batch, "the step was computed from other rows"
        rolled = [prompt for _, world in worlds for prompt in world.rolled]
        assert len(dict(rolled)) == len(rolled), "a finished prompt was generated again"
        assert [done[step] for step in range(1, STEPS + 1)] == straight.trained
        assert dict(rolled) == dict(straight.rolled)
        assert not await worlds[-1][1].left()

    asyncio.run(check())


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("method", ["reward", "adv"])
def test_rows_that_are_lost_with_a_storage_unit_are_not_generated_again(tmp_path, bound, method):
    async def check():
        options = {"folder": tmp_path, "keep_rows": RUN, "save_freq": 3, "bound": bound, "deterministic": True}
        first = MortalWorld(faults={(method, 4): DataLostError("rows were lost.")}, **options)
        with pytest.raises(
            DataLostError, match=r"rows were lost\. The journal of the data plane has these rows: resume"
        ):
            await first.live(None)
        second = MortalWorld(plane=first.plane, **options)
        found, _ = newest_whole(tmp_path)
        assert await second.live(found)
        rolled = [*first.rolled, *second.rolled]
        assert len(dict(rolled)) == len(rolled) == STEPS * BATCH, "a prompt was generated again"
        assert not await second.left()

    asyncio.run(check())


@pytest.mark.parametrize(("bound", "end"), [(0, 60), (1, 40)])
def test_rows_of_other_settings_are_discarded_and_said_to_be(tmp_path, bound, end):
    async def check():
        other = replace(RUN, settings="2")
        (_, first), (start, second) = await lives(tmp_path, [end], [RUN, other], bound=bound, save_freq=3)
        assert second.recovered.kept == 0
        assert second.recovered.discarded > 0
        assert second.recovered.why == "they were generated with other settings"
        again = {uid for uid, _ in first.rolled} & {uid for uid, _ in second.rolled}
        held = BATCH if bound and start else 0  # in the checkpoint, for the step after it
        assert len(again) == second.recovered.discarded - held
        assert len(second.trained) == STEPS - start

    asyncio.run(check())


def test_rows_of_another_run_are_refused_and_stay(tmp_path):
    async def check():
        (_, first), *_ = await lives(tmp_path / "a", [60], save_freq=3)
        first = MortalWorld(end=60, folder=tmp_path / "b", keep_rows=RUN, save_freq=3)
        assert not await first.live(None)
        before = await first.left()
        other = MortalWorld(plane=first.plane, folder=tmp_path / "c", keep_rows=replace(RUN, run="b"), save_freq=3)
        with pytest.raises(ConfigError, match="has the rows of the run 'a', not of 'b'"):
            await other.live(None)
        assert await first.left() == before

    asyncio.run(check())


def test_without_a_checkpoint_the_first_steps_are_trained_on_the_kept_rows(tmp_path):
    async def check():
        (_, first), (start, second) = await lives(tmp_path, [60], save_freq=STEPS)
        assert start == 0
        assert second.recovered.kept == len(first.rolled) > BATCH
        assert second.trained[: len(first.trained)] == first.trained

    asyncio.run(check())


class UnloadingPlane(MemoryDataPlane):
    """Notes which trajectories leave memory."""

    def __init__(self):
        super().__init__()
        self.unloaded = []

    async def unload(self, partition, keys, **_):
        there = set((await self.list_rows(partition)).keys)
        assert there.issuperset(keys)
        if partition == "train":
            self.unloaded += keys
        else:
            assert partition == "train/prompts"
            assert set(keys) == {RowKey.parse(key).uid for key in self.unloaded[-len(keys) * N :]}


@pytest.mark.parametrize("keep_rows", [RUN, None])
def test_trained_rows_that_are_kept_leave_memory(tmp_path, keep_rows):
    world = World(steps=4, folder=tmp_path, keep_rows=keep_rows, save_freq=4, plane=UnloadingPlane()).fit()
    left = Counter(RowKey.parse(key).uid for key in set(world.plane.unloaded))
    assert left == ({uid: N for batch in world.trained for uid in batch} if keep_rows else {})
    assert len(world.plane.unloaded) == left.total()


@pytest.mark.parametrize("partition", ["train", "train/prompts"])
def test_a_group_of_which_a_row_was_lost_is_generated_again_as_it_was(tmp_path, partition):
    """A plane drops rows whose bytes were damaged when it starts."""
    straight = World(steps=STEPS, save_freq=4).fit().trained

    async def check():
        first = MortalWorld(end=60, folder=tmp_path, keep_rows=RUN, save_freq=4)
        assert not await first.live(None)
        found, _ = newest_whole(tmp_path)
        finished = [uid for uid, status in first.buffers["train"].statuses().items() if status in ("finished", "taken")]
        key = next(key for key in (await first.plane.list_rows(partition)).keys if key.split("/")[0] == finished[-1])
        await first.plane.clear(partition, [key])
        second = MortalWorld(plane=first.plane, folder=tmp_path, keep_rows=RUN, save_freq=4)
        assert await second.live(found)
        assert finished[-1] in {uid for uid, _ in second.rolled}
        assert second.recovered.restarted == 1
        start = found.manifest.step if found else 0
        assert second.trained == straight[start:]
        assert not await second.left()

    asyncio.run(check())


class FailingWorld(MortalWorld):
    """A MortalWorld whose attempts at the prompt `failing` fail."""

    failing = ""

    async def generate(self, call):
        await super().generate(call)
        if self.failing in {prompt.lease.uid for prompt in call.prompts}:
            raise RolloutError("Nobody answers.")


@pytest.mark.parametrize(("bound", "end"), [(0, 40), (1, 40)])
def test_a_kept_prompt_that_had_replaced_one_which_now_succeeds_is_discarded(tmp_path, bound, end):
    async def check():
        options = {"folder": tmp_path, "keep_rows": RUN, "save_freq": STEPS, "bound": bound, "deterministic": True}
        options |= {"replay": ReplayConfig(on_failure="refill", max_attempts=1)}
        first = FailingWorld(end=end, **options)
        first.failing = "s2-1"
        assert not await first.live(None)
        assert f"s2-{BATCH}" in {uid for uid, _ in first.rolled}, "another prompt has replaced it"
        second = MortalWorld(plane=first.plane, **options)
        assert await second.live(None)
        assert second.trained[1] == [f"s2-{i}" for i in range(BATCH)]
        assert len(second.trained) == STEPS
        counts = second.trainer.group_counts()
        assert (counts.trained, counts.dropped, counts.held) == (STEPS * BATCH, 0, 0)
        assert not await second.left()

    asyncio.run(check())
