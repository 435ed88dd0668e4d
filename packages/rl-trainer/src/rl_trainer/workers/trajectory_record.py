"""Records a sample of the trajectories of each step, from the reward worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rl_protocol import BatchData, KVBatchMeta, Tag
from rl_protocol.ports import DataPlane
from rl_protocol.rl_columns import TRAIN_PARTITION
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import RecordRow, RuleRow, TokensRow, TrajectoryRow
from rl_trainer.record.trajectory_sample import RULE, choose
from rl_trainer.rewards.scorer import Failure, Outcome, Scored
from rl_trainer.workers.base import with_prompts

FAILED = 8
"""Trajectories of a call without a score that are recorded."""
MOST_OUTCOMES = 1 << 16
"""Outcomes that are kept for advantages to come."""
_FROM_ROLLOUT = ("prompts", "responses", "response_mask", "rollout_versions")
_FROM_TASK = ("data_source", "ground_truth")
_FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy", "advantages")
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Which trajectories are recorded.

    Attributes:
        freq: of every so many steps; 0: none.
        count: at most so many of a step.
        seed: of the random choice.
        stale: trajectories of a step may be of different weights.
    """

    freq: int
    count: int
    seed: int = 0
    stale: bool = False


class TrajectoryRecord:
    """Chooses trajectories of a step when their advantages are known, and writes all their columns.

    Args:
        plane: where the rows are.
        file: where they are written.
        decode: token ids to text, with special tokens.
        settings: see RecordSettings.
    """

    def __init__(
        self, plane: DataPlane, file: RecordFile, decode: Callable[[Sequence[int]], str], settings: RecordSettings
    ) -> None:
        self._plane = with_prompts(plane)
        self._file = file
        self._decode = decode
        self._settings = settings
        self._outcomes: dict[str, Outcome] = {}
        """Of trajectories whose advantages are to come."""
        self._known: set[int] = set()
        """Token ids whose text is written."""

    def due(self, batch: KVBatchMeta, step: int) -> bool:
        """Whether trajectories of this batch are recorded."""
        freq = self._settings.freq
        return bool(freq) and step % freq == 0 and batch.partition == TRAIN_PARTITION

    async def scored(self, batch: KVBatchMeta, step: int, outcomes: Sequence[Outcome]) -> None:
        """Remember what the reward function returned, and record rows on which it failed."""
        rows = [row for row, one in enumerate(outcomes) if isinstance(one, Failure)][:FAILED]
        self._outcomes |= dict(zip(batch.keys, outcomes, strict=True))
        for key in list(self._outcomes)[: max(0, len(self._outcomes) - MOST_OUTCOMES)]:
            del self._outcomes[key]  # of groups that were filtered out or dropped
        if rows:
            failed = batch.select_rows(rows)
            await self._write(failed, step, ["failed"] * len(rows), BatchData({}, len(rows)))

    async def write(self, batch: KVBatchMeta, step: int, data: BatchData, advantages: BatchData) -> None:
        """Choose trajectories, and record them.

        Args:
            batch: names of all rows of the step.
            step: its number.
            data: the columns that the stage `adv` reads.
            advantages: the columns that it writes.
        """
        rule = self._settings
        tags = (await self._plane.list_rows(batch.partition, keys=batch.keys)).tags if rule.stale else ()
        versions = [int(tag.get("version") or 0) for tag in tags]
        scores = data.dense("scores").values.tolist()
        groups = choose(batch.keys, scores, versions, _gaps(data), rule.count, (rule.seed, step))
        rows = [row for group in groups for row in group.rows]
        why = [group.why for group in groups for _ in group.rows]
        chosen = batch.select_rows(rows)
        # a step that takes the rollout's log-probs for the old ones has computed none
        computed = _FLOATS if "rollout_log_probs" in data else set(_FLOATS) - {"old_log_probs"}
        made = {name: column for name, column in {**data.columns, **advantages.columns}.items() if name in computed}
        await self._write(chosen, step, why, BatchData(made, len(batch)).select_rows(rows))
        for key in batch.keys:
            self._outcomes.pop(key, None)

    async def _write(self, batch: KVBatchMeta, step: int, why: Sequence[str], computed: BatchData) -> None:
        """Read what the rollout and the task have written, and record it with the computed
        columns."""
        stored, listed = await asyncio.gather(
            self._plane.get(batch, (*_FROM_ROLLOUT, "rollout_log_probs", *_FROM_TASK)),
            self._plane.list_rows(batch.partition, keys=batch.keys),
        )
        data = BatchData({**computed.columns, **stored.columns})
        tags = listed.tags or ({},) * len(batch)
        outcomes = [self._outcomes.get(key) for key in batch.keys]
        # the rest needs no data plane: another thread does it while the step goes on
        self._file.append_later(partial(self._rows, time.time(), batch.keys, step, why, tags, outcomes, data))

    def _rows(
        self,
        at: float,
        keys: Sequence[str],
        step: int,
        why: Sequence[str],
        tags: Sequence[Tag],
        outcomes: Sequence[Outcome | None],
        data: BatchData,
    ) -> list[RecordRow]:
        rows: list[RecordRow] = []
        if not self._known:
            rule = self._settings
            rows.append(RuleRow(at=at, text=RULE.format(count=rule.count, freq=rule.freq, failed=FAILED)))
        prompts, responses, masks, versions = (_lists(data, name) for name in _FROM_ROLLOUT)
        floats = {name: _lists(data, name) for name in _FLOATS if name in data}
        sources, truths = (data.objects(name).values() for name in _FROM_TASK)
        ids = {token for column in (prompts, responses) for row in column for token in row} - self._known
        self._known |= ids
        rows.append(TokensRow(at=at, texts={i: self._decode([i]) for i in sorted(ids)}))
        for i, (key, tag, outcome) in enumerate(zip(keys, tags, outcomes, strict=True)):
            rows.append(
                TrajectoryRow(
                    at=at,
                    step=step,
                    key=key,
                    why=why[i],
                    data_source=sources[i],
                    ground_truth=str(truths[i]),
                    prompt=self._decode(prompts[i]),
                    response=self._decode(responses[i]),
                    prompt_ids=prompts[i],
                    response_ids=responses[i],
                    response_mask=[int(made) for made in masks[i]],
                    versions=[(int(version), int(tokens)) for version, tokens in versions[i]],
                    finish=str(tag.get("finish") or ""),
                    turns=int(tag.get("turns") or 1),
                    tool_calls=int(tag.get("tool_calls") or 0),
                    reward=outcome.numbers if isinstance(outcome, Scored) else {},
                    texts=outcome.texts if isinstance(outcome, Scored) else {},
                    failure=outcome.description if isinstance(outcome, Failure) else "",
                    **{name: values[i] for name, values in floats.items()},
                )
            )
        return rows


def _lists(data: BatchData, name: str) -> list[list[Any]]:
    """[N] the values of each row; floats are rounded."""
    column = data.ragged(name)
    values = column.values.astype(np.float64).round(_DIGITS) if column.values.dtype.kind == "f" else column.values
    every = values.tolist()
    return [every[a:b] for a, b in pairwise(column.offsets.tolist())]


def _gaps(data: BatchData) -> list[float]:
    """[N] the largest difference of a token's log-probs in rollout and trainer; empty: unknown.

    It is 0 for an answer of the data, which no rollout engine generated.
    """
    if "rollout_log_probs" not in data or "old_log_probs" not in data:
        return []
    mask = data.ragged("response_mask").values.astype(np.float64)
    if "demonstration" in data:
        mask = mask * ~data.ragged("demonstration").values.astype(np.bool_)
    gap = np.abs(data.ragged("rollout_log_probs").values - data.ragged("old_log_probs").values) * mask
    starts = data.ragged("responses").offsets[:-1]
    largest = np.maximum.reduceat(np.append(gap, 0.0), starts) if starts.size else np.zeros(0)
    return np.where(data.ragged("responses").lengths > 0, largest, 0.0).tolist()
