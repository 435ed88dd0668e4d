"""Keeps the rows of trained steps until the checkpoint that contains their training is published,
and uses rows again after a restart.

For a data plane whose rows survive the death of all processes. A restarted run loads its newest
checkpoint and samples the steps after it again: a prompt that has a finished group is not
generated but takes that group, and all others are generated with the same uid and sessions, so
with the same random stream. The steps since the checkpoint are computed from the same rows, which
makes the same weights, so the rows of later steps fit them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl_protocol import ConfigError, DataLostError
from rl_protocol.rl_columns import TRAIN_PARTITION, VALIDATION_PARTITION, prompt_partition
from rl_trainer.checkpoints.held_batches import HeldBatches
from rl_trainer.data.prompt_draws import turn_of
from rl_trainer.driver.rollouts import KeptGroup, Rollouts
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.workers.columns import BASELINE_PARTITION, ROW_TAG

T = TypeVar("T")
RUN_PARTITION = "run"
"""Partition with one row, whose tags say which run has put the rows of the data plane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredRows:
    """What a restarted run does with the groups that it found in the data plane.

    Attributes:
        kept: used again, instead of generating their prompts.
        restarted: of prompts that were being generated, or of which a row was lost; these are
            generated again.
        discarded: finished ones that are not used.
        why: why these are not; empty: the checkpoint contains their training.
        held: whether those of the batches in the checkpoint are kept.
    """

    kept: int = 0
    restarted: int = 0
    discarded: int = 0
    why: str = ""
    held: bool = False


class KeptRows:
    """The groups of steps that were trained after the newest published checkpoint.

    Args:
        parts: of the run. Without `keep_rows` nothing is kept: a trained step is committed at once.
        rollouts: commit groups.
    """

    def __init__(self, parts: TrainerParts, rollouts: Rollouts) -> None:
        self._parts = parts
        self._rollouts = rollouts
        self._steps: dict[int, Sequence[int]] = {}
        """Turns of each step."""

    @property
    def turns(self) -> Collection[int]:
        """Those that were trained and are kept."""
        return [turn for turns in self._steps.values() for turn in turns]

    @property
    def groups(self) -> int:
        """Number of their groups."""
        return len(self._rollouts.taken(TRAIN_PARTITION, self.turns))

    async def trained(self, step: int, turns: Sequence[int], rows: Sequence[str]) -> None:
        """Keep or commit the groups that a step has trained. Kept rows leave memory: only a
        restarted run reads them again.
        """
        if self._parts.keep_rows is None:
            await self._rollouts.commit(TRAIN_PARTITION, turns)
        else:
            self._steps[step] = turns
            await self._parts.plane.unload(TRAIN_PARTITION, rows)
            prompts = self._rollouts.taken(TRAIN_PARTITION, turns)
            await self._parts.plane.unload(prompt_partition(TRAIN_PARTITION), prompts)

    async def unless_lost(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work of a step on rows that survive a restart.

        Raises:
            DataLostError: a storage unit died with the rows. They are not generated again: the next
                start of the data plane has them.
        """
        try:
            return await work()
        except DataLostError as error:
            raise DataLostError(f"{error} The journal of the data plane has these rows: resume the run.") from error

    async def release(self, step: int) -> None:
        """Commit the groups of the steps up to this one, whose checkpoint was published."""
        done = [number for number in self._steps if number <= step]
        if turns := [turn for number in done for turn in self._steps.pop(number)]:
            await self._rollouts.commit(TRAIN_PARTITION, turns)

    async def recover(self, trained: int, held: HeldBatches | None) -> RecoveredRows:
        """Keep the finished groups of the turns after `trained`, and discard all others.

        Args:
            trained: the last turn that the checkpoint contains; 0: there is no checkpoint.
            held: batches in the checkpoint, which replace the groups if one of these is missing.

        Raises:
            ConfigError: the rows are of another run.
        """
        if self._parts.keep_rows is None:
            return RecoveredRows()
        for name in (VALIDATION_PARTITION, BASELINE_PARTITION):
            await self._rollouts.clear(name)
        statuses = {
            uid: status
            for uid, status in self._parts.buffers[TRAIN_PARTITION].statuses().items()
            if turn_of(uid) > trained
        }
        finished = await self._groups([uid for uid, status in statuses.items() if status == "finished"])
        sampled = [uid for batch in held.batches for uid in batch.uids] if held is not None else []
        why = await self._why_not()
        if not why and not finished.keys() >= set(sampled):
            why = "some rows of the batches in the checkpoint are missing"
        kept = {} if why else finished
        await self._rollouts.keep(TRAIN_PARTITION, kept)
        await self._parts.plane.put(RUN_PARTITION, ["run"], tags=[self._parts.keep_rows.tags])
        return RecoveredRows(
            kept=len(kept),
            restarted=len(statuses) - len(finished),
            discarded=len(finished) - len(kept),
            why=why,
            held=held is not None and not why,
        )

    async def _why_not(self) -> str:
        """Why the rows can't be used; empty: they can."""
        wanted = self._parts.keep_rows
        assert wanted is not None
        found = (await self._parts.plane.list_rows(RUN_PARTITION)).tags or ()
        for tag in found:
            if tag["run"] != wanted.run:
                raise ConfigError(
                    f"TransferQueueConfig.journal_dir has the rows of the run {tag['run']!r}, not of {wanted.run!r}. Set another "
                    "folder for this run, or remove the journal if that run is not to be resumed."
                )
            if tag["settings"] != wanted.settings:
                return "they were generated with other settings"
        return ""

    async def _groups(self, uids: Sequence[str]) -> dict[str, KeptGroup]:
        """Those of these groups whose prompt is there, with the version of their oldest
        trajectory."""
        plane, versions = self._parts.plane, dict[str, int]()
        for tag in (await plane.list_rows(TRAIN_PARTITION)).tags or ():
            uid, version = str(tag["uid"]), int(tag["version"] or 0)
            versions[uid] = min(version, versions.get(uid, version))
        listed = await plane.list_rows(prompt_partition(TRAIN_PARTITION))
        rows = {uid: int(tag[ROW_TAG] or 0) for uid, tag in zip(listed.keys, listed.tags or (), strict=True)}
        return {uid: KeptGroup(versions[uid], rows[uid]) for uid in uids if uid in rows}
