"""Batches that were sampled and not trained survive a restart, in the checkpoint."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pump_world import BATCH, N, World, ages
from resumable_run import Run

from rl_protocol import DataLostError, RLError, RowKey, wire
from rl_protocol.ports import SessionResult, settle
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptOrder
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, newest_whole, step_name
from rl_trainer.checkpoints.held_batches import INDEX
from rl_trainer.config import ReplayConfig
from rl_trainer.driver.hooks import Hook

STEPS = 6


def restarted(folder, ends, **options):
    """The worlds of a run that fails in each of these updates, counted from its last start.

    A fault in the update of a step leaves the checkpoint of the step before.
    """
    worlds = []
    for update in ends:
        kept, _ = newest_whole(folder)
        world = World(steps=STEPS, folder=folder, faults={("update_actor", update): RLError("killed")}, **options)
        with pytest.raises(RLError, match="killed"):
            world.fit(kept)
        worlds.append(world)
    kept, _ = newest_whole(folder)
    return [*worlds, World(steps=STEPS, folder=folder, **options).fit(kept)]


def done(worlds):
    """Batches in the order of training, without those whose update failed."""
    return list(itertools.chain.from_iterable(world.trained for world in worlds))


@settings(max_examples=6, deadline=None)
@given(
    bound=st.integers(1, 3),
    depth=st.integers(0, 3),
    ends=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    kept=st.sampled_from([None, 2]),
    inflight=st.integers(0, 3),
)
def test_a_restarted_run_trains_the_batches_that_it_has_sampled(tmp_path_factory, bound, depth, ends, kept, inflight):
    """A deterministic one has the prompts, versions and batches of a run that was not restarted."""
    options = {
        "bound": bound,
        "depth": min(depth, bound),
        "kept": kept,
        "deterministic": True,
        "max_inflight_prompts": inflight,
    }
    whole = World(steps=STEPS, **options).fit()
    worlds = restarted(tmp_path_factory.mktemp("run"), ends, **options)
    rolled = [one for world in worlds for one in world.rolled]
    assert done(worlds) == whole.trained
    assert {
        uid: version for world in worlds for uid, version in world.versions.items()
    }.items() >= whole.versions.items()
    counts = worlds[-1].trainer.group_counts()
    counts.check()
    assert counts.held == 0
    assert counts.trained == len(worlds[-1].trained) * BATCH
    assert not any(asyncio.run(worlds[-1].plane.stats()).rows.values())
    # what was generated twice belongs to the batch that was sampled while the killed step trained
    twice = {uid.partition("-")[0] for uid, _ in rolled if [one for one, _ in rolled].count(uid) > 1}
    assert len(twice) <= len(ends)


@settings(max_examples=10, deadline=None)
@given(
    bound=st.integers(1, 3),
    depth=st.integers(0, 3),
    ends=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    when_stale=st.sampled_from(["wait", "drop"]),
    delays=st.lists(st.integers(0, 60), min_size=1, max_size=20),
)
def test_a_restarted_run_trains_each_prompt_once_whatever_is_ready_first(
    tmp_path_factory, bound, depth, ends, when_stale, delays
):
    options = {"bound": bound, "depth": min(depth, bound), "order": "ready_first", "when_stale": when_stale}
    worlds = restarted(tmp_path_factory.mktemp("run"), ends, delays=delays, on_update="continue", **options)
    rows = {uid: row for world in worlds for uid, row in world.rolled}
    trained = [uid for batch in done(worlds) for uid in batch]
    assert len(trained) == STEPS * BATCH
    assert sorted(rows[uid] for uid in trained) == sorted(PromptOrder(100, BATCH, 0).take(0, STEPS * BATCH))
    assert all(max(ages(world), default=0) <= bound for world in worlds)
    counts = worlds[-1].trainer.group_counts()
    counts.check()
    assert counts.held == 0
    assert not any(asyncio.run(worlds[-1].plane.stats()).rows.values())


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ({"bound": 3}, {"bound": 3, "depth": 1}, True),
        ({"bound": 3}, {"bound": 2}, False),
        ({"bound": 1}, {"bound": 0}, False),
        ({"bound": 1}, {"bound": 2, "order": "ready_first"}, False),
        ({"bound": 2, "order": "ready_first"}, {"bound": 2, "order": "ready_first", "when_stale": "drop"}, True),
        ({"bound": 2, "order": "ready_first"}, {"bound": 1, "order": "ready_first", "depth": 1}, False),
        ({"bound": 2, "order": "ready_first"}, {"bound": 2}, False),
    ],
)
def test_a_run_that_is_resumed_with_other_async_options_keeps_the_batches_that_fit(
    tmp_path, caplog, before, after, kept
):
    first = World(steps=STEPS, folder=tmp_path, faults={("update_actor", 2): RLError("killed")}, **before)
    with pytest.raises(RLError, match="killed"):
        first.fit()
    checkpoint, _ = newest_whole(tmp_path)
    held = {row for batch in checkpoint.held.batches for _, row in batch.prompts}
    second = World(steps=STEPS, folder=tmp_path, **after).fit(checkpoint)
    assert held.isdisjoint(row for _, row in second.rolled) == kept
    assert ("do not fit" in caplog.text) != kept
    assert max(ages(second), default=0) <= after["bound"]
    of_prompts = [prompt for batch in checkpoint.held.batches for prompt in batch.prompts] if kept else []
    worlds = [(first.rolled, first.trained[:2]), ([*of_prompts, *second.rolled], second.trained)]
    trained = [dict(rows)[uid] for rows, batches in worlds for batch in batches for uid in batch]
    assert sorted(trained) == sorted(PromptOrder(100, BATCH, 0).take(0, STEPS * BATCH))
    counts = second.trainer.group_counts()
    counts.check()
    assert counts.held == 0


def test_prompts_that_were_generated_again_keep_their_rows_and_their_order(tmp_path):
    """Their sessions have other numbers, since each is a second or third attempt."""
    replay = ReplayConfig(on_failure="refill", max_attempts=5)
    options = {"bound": 2, "deterministic": True, "replay": replay, "folder": tmp_path, "steps": STEPS}
    faults = {("rollout", number): RLError("late") for number in (9, 10, 15)}
    first = World(faults={**faults, ("update_actor", 2): RLError("killed")}, **options)
    with pytest.raises(RLError, match="killed"):
        first.fit()
    checkpoint, _ = newest_whole(tmp_path)
    held = checkpoint.held
    sessions = {key.split("/")[1] for batch in held.batches for key in batch.keys}
    assert sessions > {"0", "1"}
    second = World(**options).fit(checkpoint)
    assert done([first, second]) == World(bound=2, deterministic=True, steps=STEPS).fit().trained


class StrayRows(MemoryDataPlane):
    """Has a row of the first attempt at each prompt that was generated again, when it is listed."""

    async def list_rows(self, partition, **more):
        found = await super().list_rows(partition, **more)
        again = (
            [tag for tag in found.tags or () if tag.get("attempt") == 1] if partition == "train" and not more else []
        )
        for tag in again:
            await self.put(partition, [f"{tag['uid']}/0/0"], None, tags=[{**tag, "attempt": 0}])
        return await super().list_rows(partition, **more)


def test_a_late_row_of_an_attempt_that_is_over_is_not_kept(tmp_path):
    options = {"bound": 2, "deterministic": True, "folder": tmp_path, "steps": STEPS}
    options |= {"replay": ReplayConfig(on_failure="refill", max_attempts=5)}
    faults = {("rollout", number): RLError("late") for number in (9, 10, 15)}
    first = World(plane=StrayRows(), faults={**faults, ("update_actor", 2): RLError("killed")}, **options)
    with pytest.raises(RLError, match="killed"):
        first.fit()
    checkpoint, _ = newest_whole(tmp_path)
    second = World(**options).fit(checkpoint)
    assert done([first, second]) == World(bound=2, deterministic=True, steps=STEPS).fit().trained


class PartialWorld(World):
    """A World in which the first session of a prompt of each batch fails."""

    async def rollout(self, call):
        def without_first(prompt):
            lease = prompt.lease
            if call.partition.name != "train" or not lease.uid.endswith("-1"):
                return prompt
            failed.append(SessionResult(lease, lease.sessions[0], error="Nobody answers."))
            return msgspec.structs.replace(prompt, lease=msgspec.structs.replace(lease, sessions=lease.sessions[1:]))

        failed = []
        call = msgspec.structs.replace(call, prompts=tuple(map(without_first, call.prompts)))
        await settle(self.plane, failed)
        return await super().rollout(call)


@pytest.mark.parametrize("after", ["accept_partial", "refill", "fail"])
def test_the_other_responses_to_a_prompt_stay_if_the_resumed_run_accepts_no_failed_ones(tmp_path, after):
    options = {"bound": 1, "folder": tmp_path, "steps": STEPS}
    first = PartialWorld(
        replay=ReplayConfig(on_failure="accept_partial"), faults={("update_actor", 2): RLError("killed")}, **options
    )
    with pytest.raises(RLError, match="killed"):
        first.fit()
    checkpoint, _ = newest_whole(tmp_path)
    (held,) = checkpoint.held.batches
    second = World(replay=ReplayConfig(on_failure=after), **options).fit(checkpoint)
    counts = Counter(RowKey.parse(key).uid for key in second.keys[: len(held.keys)])
    assert counts == {uid: 1 if uid == held.uids[1] else N for uid in held.uids}
    assert done([second])[0] == sorted(held.uids)
    second.trainer.group_counts().check()


@pytest.mark.parametrize("inflight", [0, 2])
def test_prompts_with_other_numbers_of_responses_keep_them(tmp_path, inflight):
    """Also those that were generated again, and those of batches in a checkpoint that another
    start writes again.
    """
    replay = ReplayConfig(on_failure="refill", max_attempts=5)
    options = {"bound": 2, "deterministic": True, "replay": replay, "sessions": lambda row: 1 if row % 3 else 3}
    options |= {"max_inflight_prompts": inflight}
    whole = World(steps=STEPS, **options).fit()
    faults = {("rollout", number): RLError("late") for number in (2, 9)}
    first = World(steps=STEPS, folder=tmp_path, faults={**faults, ("update_actor", 1): RLError("killed")}, **options)
    with pytest.raises(RLError, match="killed"):
        first.fit()
    worlds = [first, *restarted(tmp_path, [1], **options)]
    assert done(worlds) == whole.trained
    rows = {uid: row for world in worlds for uid, row in world.rolled}
    trained = Counter(RowKey.parse(key).uid for world in worlds for key in world.keys)
    assert trained == {uid: 1 if row % 3 else 3 for uid, row in rows.items()}
    assert set(trained.values()) == {1, 3}
    assert not any(asyncio.run(worlds[-1].plane.stats()).rows.values())


def test_rows_that_are_lost_during_the_copy_are_left_out_and_generated_again(tmp_path):
    world = World(bound=1, steps=4, folder=tmp_path, deterministic=True)

    async def lost(call):
        raise DataLostError("a unit died")

    world.rows.copy_rows = lost
    world.fit()
    checkpoint = inspect(tmp_path / step_name(2))
    assert checkpoint.held is None
    assert len(checkpoint.run_state.prompts_untrained) == BATCH
    resumed = World(bound=1, steps=4, folder=tmp_path / "more", deterministic=True).fit(checkpoint)
    assert done([resumed]) == world.trained[2:]


def test_without_sampling_ahead_a_checkpoint_has_no_batches(tmp_path):
    World(bound=0, steps=3, folder=tmp_path).fit()
    for step in (1, 2, 3):
        checkpoint = inspect(tmp_path / step_name(step))
        assert checkpoint.held is None
        assert not (checkpoint.folder / "held").exists()


@pytest.mark.parametrize("bound", [1, 2])
def test_weights_are_bit_equal_after_a_failure_and_a_resume(model_path, tmp_path, bound):
    """The resumed run gets its first batches, with all columns and tags, from the checkpoint."""

    class Failing(Hook):
        def on_step_begin(self, step):
            if step == 3:
                raise ValueError("killed")

    def run(folder, **more):
        torch.manual_seed(3)
        return Run(model_path, folder, steps=5, bound=bound, **more)

    straight, failed = run(None), run(tmp_path, hooks={"failing": Failing()})
    straight.fit()
    with pytest.raises(RLError, match="killed"):
        failed.fit()
    checkpoint, _ = newest_whole(tmp_path)
    assert [batch.turn for batch in checkpoint.held.batches] == list(range(3, 3 + bound))
    resumed = run(tmp_path)
    resumed.fit()
    weights = straight.weights()
    assert all(np.array_equal(weights[name], value) for name, value in resumed.weights().items())
    assert not all(np.array_equal(weights[name], value) for name, value in failed.weights().items())
    lag = [resumed.metrics[step]["training/off_policy/trajectory_staleness_worst/max"] for step in (3, 4, 5)]
    assert (
        lag
        == [straight.metrics[step]["training/off_policy/trajectory_staleness_worst/max"] for step in (3, 4, 5)]
        == [bound] * 3
    )


def reseal(checkpoint):
    """Write the manifest of the files that are in the folder now."""
    from rl_trainer.checkpoints.checkpoint_folder import MANIFEST, facts

    files = {
        name: facts(checkpoint.folder / name)
        for name in checkpoint.manifest.files
        if (checkpoint.folder / name).exists()
    }
    manifest = msgspec.structs.replace(checkpoint.manifest, files=files)
    (checkpoint.folder / MANIFEST).write_bytes(manifest.sealed())


class TestDamagedBatches:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        World(bound=2, steps=4, folder=tmp_path, deterministic=True).fit()
        found = inspect(tmp_path / step_name(2))
        assert isinstance(found, Checkpoint)
        return found

    @pytest.mark.parametrize("name", [INDEX, "held/train.batch", "held/prompts.batch"])
    def test_a_changed_byte_or_a_missing_file_is_named(self, checkpoint, name):
        path = checkpoint.folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert inspect(checkpoint.folder) == f"{name} is not what was written: its SHA-256 differs"
        path.unlink()
        assert inspect(checkpoint.folder) == f"{name} can't be read: No such file or directory"

    def test_files_that_contradict_each_other_are_refused(self, checkpoint):
        """Their digests are right, as if another program had written them."""
        path = checkpoint.folder / INDEX
        held, content = checkpoint.held, path.read_bytes()

        def fault(**change):
            path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(held, **change)))
            reseal(checkpoint)
            return inspect(checkpoint.folder)

        assert fault(step=1) == (
            "held/batches.msgpack is wrong: it has the batches of turns [3, 4] after step 1, which do not follow step 2"
        )
        assert fault(trajectories=()) == f"held/batches.msgpack is wrong: no file has row {held.batches[0].keys[0]}"
        path.write_bytes(b"no msgpack")
        reseal(checkpoint)
        assert "held/batches.msgpack can't be read: " in inspect(checkpoint.folder)
        path.write_bytes(content)
        (checkpoint.folder / "held/train.batch").unlink()
        reseal(checkpoint)
        assert inspect(checkpoint.folder) == (
            "held/batches.msgpack is wrong: the manifest does not name held/train.batch, which has rows of the batches"
        )

    def test_columns_are_in_the_wire_format(self, checkpoint):
        held = checkpoint.held
        rows = held.trajectories[0]
        batch = wire.decode((checkpoint.folder / "held" / rows.file).read_bytes())
        assert len(batch) == len(rows.keys) == 2 * BATCH * 2
        assert list(batch.columns) == ["responses"]
