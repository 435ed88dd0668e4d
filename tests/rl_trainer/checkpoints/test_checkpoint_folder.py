"""Checkpoint folders: which are complete, which are kept, and how saves affect the run."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError, OutputError, WorkerError
from rl_trainer import Workers
from rl_trainer.checkpoints.checkpoint_folder import (
    Checkpoint,
    Manifest,
    RunState,
    facts,
    inspect,
    newest_whole,
    step_name,
    step_of,
    superseded,
    sweep,
)
from rl_trainer.driver.checkpoint_writer import CheckpointWriter, load
from rl_trainer.workers.messages import FinishSaveCall, LoadStateCall, SaveStateCall
from rl_trainer.workers.stateful import StatefulWorker


class Number(StatefulWorker):
    """A worker whose state is one number; `gate` delays its writes, `fault` makes them fail."""

    handlers = StatefulWorker.state_handlers

    def __init__(self, number=0):
        self.number, self.gate, self.fault = number, threading.Event(), None
        self.gate.set()

    def copy_state(self, part):
        number = self.number

        def write(folder):
            assert self.gate.wait(30)
            if self.fault is not None:
                raise self.fault
            (folder / "n").write_text(str(number))
            return [folder / "n"]

        return {part: write}

    def take_state(self, folder):
        self.number = int((folder / "n").read_text())


class LocalWorker:
    name, bytes_moved = "w", 0

    def __init__(self, worker):
        self.worker = worker

    async def call(self, method, payload, *, timeout_s):
        return await self.worker.handle(method, payload)


def parts(*numbers):
    workers = [Number(n) for n in numbers]
    actor, reward = (LocalWorker(w) for w in workers)
    return workers, Workers(rollout=[], actor=[actor], reward=reward)


async def save(folder, *steps, keep=0, scores=()):
    _, workers = parts(7, 8)
    writer = CheckpointWriter(folder, config="a: 1\n", keep=keep, workers=workers, timeout_s=60)
    for i, step in enumerate(steps):
        await writer.begin(RunState(step=step, version=step), scores[i] if scores else None)
    return await writer.finish()


def resealed(path, *, step=None, without="", more="", digest=None):
    """Change a manifest and compute its digest again, unless `digest` replaces it."""
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    files = {name: facts for name, facts in manifest.files.items() if name != without}
    if more:
        files[more] = files["actor/n"]
    changed = msgspec.structs.replace(manifest, files=files, step=manifest.step if step is None else step)
    path.write_bytes(changed.sealed())
    if digest is not None:
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"digest": digest}))


# -- complete checkpoints
def test_what_is_saved_is_found_and_taken_over(tmp_path):
    asyncio.run(save(tmp_path, 9, 10))
    found, skipped = newest_whole(tmp_path)
    assert (found.folder.name, found.config, found.run_state) == (
        "step-000010",
        "a: 1\n",
        RunState(step=10, version=10),
    )
    assert skipped == {}
    assert {*found.manifest.files} == {"actor/n", "reward/n", "config.yaml", "trainer.json"}
    (actor, reward), workers = parts(0, 0)
    asyncio.run(load(found, workers, 30))
    assert (actor.number, reward.number) == (7, 8)


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("actor/n", lambda p: p.write_text("77"), r"actor/n has 2 bytes, and the manifest says 1"),
        ("actor/n", lambda p: p.write_text("6"), r"actor/n is not what was written: its SHA-256 differs"),
        ("reward/n", lambda p: p.unlink(), r"reward/n can't be read: No such file"),
        ("manifest.json", lambda p: p.unlink(), r"manifest\.json can't be read"),
        ("manifest.json", lambda p: p.write_text(p.read_text()[:-40]), r"manifest\.json can't be read"),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace('"format": 2', '"format": 3')),
            "its format is 3",
        ),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace('"score": null', '"score": 9.5')),
            r"manifest\.json is not what was written: its SHA-256 differs",
        ),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace("{", '{"unknown": 1,', 1)),
            r"manifest\.json is not what was written",
        ),
        ("manifest.json", lambda p: resealed(p, digest=""), r"manifest\.json is not what was written"),
        ("manifest.json", lambda p: resealed(p, step=3), "is that of step 3, and the folder is named step-000002"),
        ("manifest.json", lambda p: resealed(p, without="trainer.json"), "does not name"),
        ("manifest.json", lambda p: resealed(p, more="../outside"), r"names '\.\./outside', which is not below"),
        ("manifest.json", lambda p: resealed(p, more="/etc/passwd"), "names '/etc/passwd', which is not below"),
        (
            "actor/rank-00001-of-00002.json",
            lambda p: p.write_text("{}"),
            r"actor/rank-00001-of-00002\.json is not named in manifest\.json",
        ),
        ("critic", lambda p: (p.mkdir(), (p / "n").write_text("1")), "critic/n is not named"),
    ],
)
def test_what_is_not_whole_is_passed_over_and_says_why(tmp_path, name, damage, why):
    asyncio.run(save(tmp_path, 1, 2))
    damage(tmp_path / step_name(2) / name)
    found, skipped = newest_whole(tmp_path)
    assert found.manifest.step == 1
    assert [*skipped] == ["step-000002"]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(skipped["step-000002"])
    asyncio.run(save(tmp_path, 2))  # the resumed run saves this step again
    assert isinstance(inspect(tmp_path / step_name(2)), Checkpoint)


def test_the_state_of_another_step_is_refused_and_what_users_add_is_not(tmp_path):
    asyncio.run(save(tmp_path, 1))
    folder = tmp_path / step_name(1)
    (folder / "hf").mkdir()
    (folder / "hf" / "README.md").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    assert isinstance(inspect(folder), Checkpoint)
    state = folder / "trainer.json"
    state.write_bytes(msgspec.json.encode(RunState(step=2)))
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    files = {**manifest.files, "trainer.json": facts(state)}
    (folder / "manifest.json").write_bytes(msgspec.structs.replace(manifest, files=files).sealed())
    assert inspect(folder) == "trainer.json is that of step 2, manifest.json of 1"
    state.write_text("[]")
    files["trainer.json"] = facts(state)
    (folder / "manifest.json").write_bytes(msgspec.structs.replace(manifest, files=files).sealed())
    assert "trainer.json can't be read" in inspect(folder)


def test_a_copy_under_a_name_of_its_own_is_a_checkpoint(tmp_path):
    asyncio.run(save(tmp_path, 3))
    kept = (tmp_path / step_name(3)).rename(tmp_path / "the-good-one")
    assert inspect(kept).manifest.step == 3
    moved = kept.rename(tmp_path / step_name(30))
    assert "is that of step 3" in inspect(moved)


def test_folders_of_other_names_are_no_checkpoints(tmp_path):
    assert newest_whole(tmp_path / "nothing") == (None, {})
    asyncio.run(save(tmp_path, 3))
    (tmp_path / step_name(3)).rename(tmp_path / ".saving-step-000004")
    assert newest_whole(tmp_path) == (None, {})
    assert step_of("step-12") is None
    assert step_of(step_name(1_234_567)) == 1_234_567


def test_only_the_unfinished_folders_of_checkpoints_are_deleted(tmp_path):
    theirs = [".backup-of-step-000003", ".old-step-000001", ".saving-step-000004-mine"]
    for name in (*theirs, ".saving-step-000004", ".deleting-step-000001"):
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == theirs


# -- which checkpoints are kept
def test_the_newest_and_the_best_stay(tmp_path):
    asyncio.run(save(tmp_path, 1, 2, 3, 4, 5, keep=2, scores=[0.1, 0.9, None, 0.9, 0.3]))
    # of two equally good ones, the later is kept
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000004",
        "step-000005",
    ]
    asyncio.run(save(tmp_path, 6, 7, keep=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000006", "step-000007"]


def test_a_damaged_one_that_was_skipped_takes_the_place_of_none(tmp_path):
    asyncio.run(save(tmp_path, 1, 4, scores=[None, 0.9]))
    (tmp_path / step_name(4) / "trainer.json").write_text("{")
    asyncio.run(save(tmp_path, 2, keep=1))
    asyncio.run(save(tmp_path, 3, keep=1))
    assert newest_whole(tmp_path)[0].manifest.step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]
    asyncio.run(save(tmp_path, 4, keep=1))
    assert newest_whole(tmp_path)[0].manifest.step == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


@given(
    st.dictionaries(st.integers(0, 20), st.none() | st.floats(-1, 1), max_size=8),
    st.integers(0, 4),
)
@settings(max_examples=60)
def test_never_fewer_than_asked_for_and_never_without_the_best(scores, keep):
    gone = set(superseded(scores, keep))
    left = scores.keys() - gone
    assert gone <= scores.keys()
    assert sorted(left)[-keep:] == sorted(scores)[-keep:] if keep else not gone
    known = [score for score in scores.values() if score is not None]
    if known:
        assert max(known) in {scores[step] for step in left}
    if keep:
        assert len(left) <= keep + 1


# -- saves during the run
def test_the_loop_continues_while_a_save_is_written(tmp_path):
    async def run():
        (actor, _), workers = parts(1, 1)
        writer = CheckpointWriter(tmp_path, config="", keep=0, workers=workers, timeout_s=60)
        actor.gate.clear()
        await writer.begin(RunState(step=1), None)  # returns while the write is blocked
        actor.number = 2  # the next step changes the state
        assert writer.poll() is None
        assert newest_whole(tmp_path) == (None, {})
        second = asyncio.create_task(writer.begin(RunState(step=2), None))
        await asyncio.sleep(0.1)
        assert not second.done()  # one save at a time
        actor.gate.set()
        await second
        return await writer.finish()

    saved = asyncio.run(run())
    assert saved.step == 2
    assert saved.num_bytes == 2
    assert [(tmp_path / step_name(n) / "actor" / "n").read_text() for n in (1, 2)] == ["1", "2"]


def test_a_save_that_fails_is_an_error_of_the_next_step_and_the_last_one_stays(tmp_path):
    async def run():
        (actor, _), workers = parts(1, 1)
        writer = CheckpointWriter(tmp_path, config="", keep=1, workers=workers, timeout_s=60)
        await writer.begin(RunState(step=1), None)
        await writer.finish()
        actor.fault = OSError(28, "No space left on device")
        await writer.begin(RunState(step=2), None)
        await asyncio.wait([writer._saving], timeout=120)
        with pytest.raises(OutputError, match=r"step-000002: No space left on device.*CheckpointWriter\.keep"):
            writer.poll()
        assert writer.poll() is None  # the error is raised once

    asyncio.run(run())
    assert newest_whole(tmp_path)[0].manifest.step == 1
    asyncio.run(save(tmp_path, 2))  # removes what the failed save left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_saves_of_a_worker_do_not_overlap_and_come_in_pairs(tmp_path):
    async def run():
        worker = Number()
        call = SaveStateCall(path=str(tmp_path), part="actor")
        with pytest.raises(WorkerError, match="no save was begun"):
            await worker.finish_save(FinishSaveCall())
        await worker.save_state(call)
        with pytest.raises(WorkerError, match="call finish_save first"):
            await worker.save_state(call)
        assert [*(await worker.finish_save(FinishSaveCall())).files] == ["actor/n"]

    asyncio.run(run())


# -- another model
def test_the_state_of_another_model_is_refused(model_path, tmp_path):
    from rl_trainer import ActorConfig, LoraConfig
    from rl_trainer.backends.torch_policy import TorchPolicyBackend

    whole, small, large = (
        TorchPolicyBackend(model_path, ActorConfig(), lora=lora)
        for lora in (None, LoraConfig(rank=2), LoraConfig(rank=4))
    )
    small.snapshot()(tmp_path)
    with pytest.raises(ConfigError, match=r"another model: .* is in one of them only.*PPOTrainer\.resume"):
        whole.restore(tmp_path)
    with pytest.raises(ConfigError, match=r"another model: .*lora_A.* has the shape \(2, \d+\) there, \(4, \d+\) here"):
        large.restore(tmp_path)
    small.restore(tmp_path)
    frozen = TorchPolicyBackend(model_path, None)
    with pytest.raises(ConfigError, match="frozen"):
        frozen.snapshot()
    (tmp_path / "rank-00000-of-00001.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        small.restore(tmp_path)


def test_messages_survive_the_wire():
    message = LoadStateCall(path="/x")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=LoadStateCall) == message
