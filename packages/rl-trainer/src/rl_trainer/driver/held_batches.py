"""Keeps batches that were sampled and not trained over a restart: in the checkpoint, and back."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rl_protocol import DataLostError, KVBatchMeta, RowKey, Tag
from rl_protocol.ports import Lease, SessionResult, settle
from rl_protocol.rl_columns import TRAIN_PARTITION, prompt_partition
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.checkpoints.held_batches import HELD, HeldBatch, HeldBatches, SavedRows
from rl_trainer.driver.batch_sampler import Sampled, Sampler
from rl_trainer.driver.stage_calls import call
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.workers.messages import CopyRowsCall, PromptRef, PutRowsCall, StageResult

logger = logging.getLogger(__name__)


class BatchKeeper:
    """Copies sampled batches into a checkpoint, and restores them.

    The driver keeps names, tags and numbers. The reward worker copies the columns from the data
    plane into files of the checkpoint, and puts them back.

    Args:
        parts: of the run.
        sampler: samples its batches.
        policy: which turns it samples.
    """

    def __init__(self, parts: TrainerParts, sampler: Sampler, policy: StalenessPolicy) -> None:
        self._parts = parts
        self._sampler = sampler
        self._policy = policy

    async def hold(self, step: int, waiting: Mapping[int, Sampled]) -> HeldBatches | None:
        """Have the reward worker copy the rows of the batches that wait, by turn, after a step.

        Returns:
            What the driver writes; None: there is no batch, or rows were lost with a storage unit.
        """
        if not waiting:
            return None
        batches = [self._held(turn, waiting[turn]) for turn in sorted(waiting)]
        keys = [key for batch in batches for key in batch.keys]
        uids = dict.fromkeys(RowKey.parse(key).uid for key in keys)
        listed = await self._parts.plane.list_rows(TRAIN_PARTITION)
        tags = dict(zip(listed.keys, listed.tags, strict=True))
        attempts = {(tags[key]["uid"], tags[key]["attempt"]) for key in keys}
        # a worker may just have put a row of an attempt that is over
        others = [key for key in set(tags).difference(keys) if (tags[key]["uid"], tags[key]["attempt"]) in attempts]
        held = HeldBatches(
            step=step,
            sessions=self._parts.rollout.n,
            batches=tuple(batches),
            trajectories=(_saved(keys, tags, "train.batch" if keys else ""), _saved(sorted(others), tags)),
            prompts=SavedRows(
                partition=prompt_partition(TRAIN_PARTITION), keys=tuple(uids), file="prompts.batch" if uids else ""
            ),
            turns_per_step=self._policy.turns_per_step,
        )
        files = CopyRowsCall(rows=tuple(rows for rows in (*held.trajectories, held.prompts) if rows.file))
        try:
            await self._call("copy_rows", files)
        except DataLostError as error:
            logger.warning("The checkpoint of step %d has no sampled batches: %s", step, error)
            return None
        return held

    def _held(self, turn: int, sampled: Sampled) -> HeldBatch:
        return HeldBatch(
            turn=turn,
            places=self._sampler.draws.places(turn),
            prompts=tuple((prompt.uid, prompt.row) for prompt in sampled.prompts),
            sessions={prompt.uid: prompt.sessions for prompt in sampled.prompts if prompt.sessions is not None},
            keys=sampled.rows.keys,
            metrics=sampled.metrics,
            scores=dict(sampled.scores),
        )

    def usable(self, held: HeldBatches | None, version: int) -> HeldBatches | None:
        """The batches, if they fit the AsyncConfig of this run, which may be another one than that
        of the run before; None: they do not, or there are none.

        `version` is that of the weights which the next step trains.
        """
        if held is None:
            return None
        versions, policy = held.versions, self._policy
        oldest = {batch.turn: min(versions[uid] for uid in batch.uids) for batch in held.batches if batch.uids}
        numbered = held.turns_per_step == policy.turns_per_step and (
            policy.order != "in_order"
            or all(batch.turn == held.step + i for i, batch in enumerate(held.batches, 1))  # with one prompt per step
        )
        if numbered and policy.all_in_time(oldest, held.step, version):
            return held
        logger.warning(
            "The checkpoint of step %d has batches that were sampled with another AsyncConfig and do not fit this one: their prompts are "
            "generated again.",
            held.step,
        )
        return None

    async def restore(self, held: HeldBatches, checkpoint: Path, version: int) -> dict[int, Sampled]:
        """Put the rows back into the data plane, and take their groups to train `version`.

        Raises:
            WireError: a file is damaged.
            RLError: a part failed.
        """
        sessions = _sessions_of(held.trajectories)
        leases = await self._lease(held, sessions)
        trajectories = [_leased(rows, leases, sessions) for rows in held.trajectories if rows.keys]
        prompts = [held.prompts] if held.prompts.keys else []
        await self._call("put_rows", PutRowsCall(path=str(checkpoint / HELD), rows=(*trajectories, *prompts)))
        await settle(self._parts.plane, _results(trajectories, leases), timeout_s=self._parts.loop.stage_timeout_s)
        names = {
            old: new
            for before, after in zip((rows for rows in held.trajectories if rows.keys), trajectories, strict=True)
            for old, new in zip(before.keys, after.keys, strict=True)
        }
        return {batch.turn: await self._take(batch, held.sessions, names, version) for batch in held.batches}

    async def _lease(self, held: HeldBatches, sessions: Mapping[str, Sequence[int]]) -> dict[str, Lease]:
        """Add the groups to the replay buffer, and lease them with the version of their oldest
        trajectory.

        They have the sessions with trajectories alone: others had failed before the checkpoint,
        which this run may not accept (ReplayConfig.on_failure).
        """
        buffer, timeout_s, versions = (
            self._parts.buffers[TRAIN_PARTITION],
            self._parts.loop.stage_timeout_s,
            held.versions,
        )
        by_version: defaultdict[int, list[str]] = defaultdict(list)
        for batch in held.batches:
            await buffer.add(batch.uids, [len(sessions[uid]) for uid in batch.uids])
            for uid in batch.uids:
                by_version[versions[uid]].append(uid)
        leases: dict[str, Lease] = {}
        for version, uids in sorted(by_version.items()):
            while left := [uid for uid in uids if uid not in leases]:
                some = await buffer.lease(len(left), version=version, timeout_s=timeout_s, uids=left)
                leases |= {lease.uid: lease for lease in some}
        return leases

    async def _take(self, batch: HeldBatch, sessions: int, names: Mapping[str, str], version: int) -> Sampled:
        """Take the groups of a batch, as if they had been sampled now.

        `sessions` is the number of sessions of prompts for which the batch has no other one.
        """
        rows, uids = KVBatchMeta(partition=TRAIN_PARTITION, keys=()), batch.uids
        if uids:
            taken = await self._parts.buffers[TRAIN_PARTITION].take(
                len(uids), version=version, timeout_s=self._parts.loop.stage_timeout_s, uids=uids
            )
            rows = taken.select_keys([names[key] for key in batch.keys])
        self._sampler.adopt(batch.turn, uids)
        prompts = [PromptRef(uid, row, batch.sessions.get(uid, sessions)) for uid, row in batch.prompts]
        return Sampled(rows, prompts, len(uids), dict(batch.metrics), batch.scores)

    async def _call(self, method: str, message: msgspec.Struct) -> None:
        parts = self._parts
        await call(parts.workers.reward, method, message, StageResult, parts.loop.stage_timeout_s)


def _saved(keys: Sequence[str], tags: Mapping[str, Tag], file: str = "") -> SavedRows:
    return SavedRows(partition=TRAIN_PARTITION, keys=tuple(keys), tags=tuple(tags[key] for key in keys), file=file)


def _sessions_of(trajectories: Sequence[SavedRows]) -> Mapping[str, Sequence[int]]:
    """The sessions of each group that have trajectories, ascending, by uid."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for key in (RowKey.parse(key) for rows in trajectories for key in rows.keys):
        found[key.uid].add(key.session)
    return {uid: sorted(sessions) for uid, sessions in found.items()}


def _leased(rows: SavedRows, leases: Mapping[str, Lease], sessions: Mapping[str, Sequence[int]]) -> SavedRows:
    """The rows under the sessions of new leases, which are first attempts."""
    keys, tags = list[str](), list[Tag]()
    for key, tag in zip(rows.keys, rows.tags, strict=True):
        old = RowKey.parse(key)
        lease = leases[old.uid]
        session = lease.sessions[sessions[old.uid].index(old.session)]
        keys.append(RowKey(old.uid, session, old.index).text)
        tags.append({**tag, "attempt": lease.attempt})
    return msgspec.structs.replace(rows, keys=tuple(keys), tags=tuple(tags))


def _results(trajectories: Sequence[SavedRows], leases: Mapping[str, Lease]) -> list[SessionResult]:
    """How each session of the leases ended."""
    counts = Counter((key.uid, key.session) for rows in trajectories for key in map(RowKey.parse, rows.keys))
    return [
        SessionResult(lease, session, rows=counts[uid, session])
        for uid, lease in leases.items()
        for session in lease.sessions
    ]
