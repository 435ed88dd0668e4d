"""A model of checkpoints and restarts: the driver is killed at any event, and resumes.

Trainer, replay buffer, data plane and checkpoints are real; the calls of workers end when a rule
says so. A kill loses the event loop and the data plane, and keeps the folder of the checkpoints.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from pump_world import BATCH, HeldWorld, Loop, World, ages, play
from replay_buffers import opened

from rl_trainer import PromptOrder
from rl_trainer.checkpoints.checkpoint_folder import newest_whole

STEPS = 4


@functools.cache
def uninterrupted(bound):
    """The batches of a run that nobody kills, and the version that started each prompt."""
    world = World(bound=bound, steps=STEPS, deterministic=True).fit()
    return world.trained, world.versions


class InlineLoop(Loop):
    """Runs the work of threads at once, so that every order of events is one of the rules."""

    def run_in_executor(self, executor, func, *args):
        done = self.create_future()
        done.set_result(func(*args))
        return done


class Restarts(RuleBasedStateMachine):
    """Any order of answers, with kills between them."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run = None

    @initialize(bound=st.integers(1, 3), inflight=st.integers(1, 3))
    def start(self, bound, inflight):
        self.options = {"bound": bound, "max_inflight_prompts": inflight, "deterministic": True}
        self.done, self.trained, self.rows, self.versions = 0, [], {}, {}
        self.resume()

    def resume(self):
        """Start a driver, from the newest checkpoint if there is one."""
        kept, _ = newest_whole(self.folder)
        held = kept.held if kept is not None else None
        self.kept = {uid for batch in held.batches for uid in batch.uids} if held else set()
        self.loop = InlineLoop()
        asyncio.set_event_loop(self.loop)
        self.world = HeldWorld(self.loop, steps=STEPS, folder=self.folder, **self.options)

        async def train():
            async with opened(self.world.buffers):
                if kept is not None:
                    await self.world.trainer.resume(kept)
                await self.world.trainer.fit()

        self.run = self.loop.create_task(train())
        self.loop.spin()

    def note(self):
        """Keep what the driver has done up to its newest checkpoint, and what it has generated."""
        kept, _ = newest_whole(self.folder)
        step = kept.manifest.step if kept is not None else 0
        self.trained += self.world.trained[: step - self.done]
        self.done = step
        self.rows |= dict(self.world.rolled)
        for uid, version in self.world.versions.items():
            assert self.versions.setdefault(uid, version) == version, "a ticket started with another version"

    @precondition(lambda self: not self.run.done())
    @rule(which=st.integers(0, 7))
    def a_call_ends(self, which):
        held = self.world.held
        held[which % len(held)].set_result(None)
        self.loop.spin()

    @rule()
    def some_calls_end_in_order(self):
        for _ in range(10):
            if self.world.held:
                self.world.held[0].set_result(None)
                self.loop.spin()

    @precondition(lambda self: not self.run.done())
    @rule()
    def the_driver_is_killed(self):
        self.kill()
        self.resume()

    def kill(self):
        self.run.cancel()
        self.loop.spin()
        assert self.run.done()
        self.note()
        self.loop.close()

    @invariant()
    def somebody_works_or_the_run_is_over(self):
        assert self.run is None or self.run.done() or self.world.held, "a deadlock: no call is open"

    @invariant()
    def nothing_is_generated_that_the_checkpoint_has(self):
        assert self.run is None or not self.kept & {uid for uid, _ in self.world.rolled}

    @invariant()
    def nothing_is_older_than_the_bound(self):
        assert self.run is None or max(ages(self.world), default=0) <= self.options["bound"]

    def teardown(self):
        try:
            if self.run is None:
                return
            while not self.run.done():
                self.a_call_ends(0)
            self.run.result()
            self.note()
            counts = self.world.trainer.group_counts()
            counts.check()
            assert (counts.dropped, counts.held) == (0, 0)
            assert not any(self.loop.run_until_complete(self.world.plane.stats()).rows.values())
            self.loop.close()
            batches, versions = uninterrupted(self.options["bound"])
            uids = [uid for batch in self.trained for uid in batch]
            assert self.trained == batches
            assert sorted(self.rows[uid] for uid in uids) == sorted(PromptOrder(100, BATCH, 0).take(0, len(uids)))
            assert {uid: self.versions[uid] for uid in uids} == versions
        finally:
            shutil.rmtree(self.folder)


def test_a_run_that_is_killed_at_any_event_trains_every_ticket_once_and_as_if_it_had_not_been():
    play(Restarts, examples=12, steps=30)


@pytest.mark.nightly
def test_ten_thousand_events():
    play(Restarts, examples=250, steps=40)
