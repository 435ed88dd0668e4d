"""Draw batches from a plane with a sampler: each row goes to one batch of a task.

Ranks agree on batches without talking to each other. A draw may have a *turn*, the number of the
batch. The first rank that asks for a turn chooses for all ranks and stores the choice in the
partition `<partition>/draws`; the others read it there. A draw without a turn is the caller's
alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import ObjectColumn
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Scalar
from rl_protocol.counted import counted
from rl_protocol.errors import ConflictError, MissingDataError, PlaneTimeout
from rl_protocol.ports import DataPlane
from rl_transferqueue.client.deadline import deadline_after, seconds_until
from rl_transferqueue.consume.samplers import Sampler

_SHARES = "shares"
_BY = "by"
"""Tag of a turn: who is choosing; empty: nobody any more."""
_REST = 4.0
"""A draw that waits lists the ready rows again after this many times the duration of the last list,
so that many small puts do not make it list all of them after each."""


def draws_of(partition: str) -> str:
    """The partition that holds the draws of a partition; clear it together with that."""
    return f"{partition}/draws"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSettings:
    """Which rows `draw` takes, and for whom.

    Attributes:
        partition: the partition of the rows.
        task: the consumer; a task gets each row once.
        count: units per draw, for all ranks together; see `Sampler.sample`.
        fields: columns that the rows must have.
        where: tags that the rows must have.
        timeout_s: seconds that one draw may take.
    """

    partition: str
    task: str
    count: int
    fields: tuple[str, ...] = ()
    where: Mapping[str, Scalar] | None = None
    timeout_s: float = 60.0


async def draw(
    plane: DataPlane,
    sampler: Sampler,
    settings: DrawSettings,
    *,
    turn: str | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> list[KVBatchMeta]:
    """Choose rows for every rank with `sampler`, and mark them consumed by the task.

    Args:
        plane: holds the rows.
        sampler: chooses among the ready rows.
        settings: which rows, how many, and for which task.
        turn: names the batch; all callers with the same task and turn get the same rows.
        on_wait: called with what is missing, each time the draw waits.

    Returns:
        The rows of rank 0, 1, ...

    Raises:
        PlaneTimeout: the sampler found too few rows before the deadline, or another process that
            chooses for this turn did not finish.
    """
    drawing = _Drawing(plane, sampler, settings, on_wait)
    shares = await (drawing.choose() if turn is None else drawing.agree(f"{settings.task}/{turn}"))
    partition, fields = settings.partition, settings.fields
    return [KVBatchMeta(partition=partition, keys=tuple(keys), fields=fields) for keys in shares]


class _Drawing:
    """One call of `draw`."""

    def __init__(
        self, plane: DataPlane, sampler: Sampler, settings: DrawSettings, on_wait: Callable[[str], None] | None
    ) -> None:
        self._plane = plane
        self._sampler = sampler
        self._settings = settings
        self._on_wait = on_wait
        self._me = os.urandom(8).hex()
        self._deadline = deadline_after(settings.timeout_s)

    async def choose(self) -> list[list[str]]:
        """Choose among the ready rows, as soon as there are enough, and claim them."""
        wanted, version = self._settings, 0
        while True:
            began = time.perf_counter()
            ready = await self._plane.list_rows(
                wanted.partition, where=wanted.where, fields=wanted.fields, task=wanted.task
            )
            listed_s = time.perf_counter() - began
            shares = [[ready.keys[row] for row in share] for share in self._sampler.sample(ready, wanted.count)]
            if any(shares):
                keys = [key for share in shares for key in share]
                try:
                    await self._plane.claim(wanted.partition, keys, task=wanted.task)
                except (ConflictError, MissingDataError):  # another process took some: list again
                    continue
                return shares
            version = await self._wait(wanted.partition, version, f"rows that were ready: {len(ready)}")
            await asyncio.sleep(min(_REST * listed_s, seconds_until(self._deadline)))

    async def agree(self, turn: str) -> list[list[str]]:
        """Choose for this turn, or wait for the choice of another process."""
        draws, version = draws_of(self._settings.partition), 0
        while True:
            try:
                await self._plane.put(draws, [turn], tags=[{"turn": turn, _BY: self._me}], expect=[None])
            except ConflictError:
                try:
                    made = await self._plane.get(KVBatchMeta(partition=draws, keys=(turn,)), [_SHARES])
                    return made.objects(_SHARES).row(0)
                except MissingDataError:
                    version = await self._wait(draws, version, "another process is choosing", {"turn": turn})
                    continue
            except BaseException:
                await self._give_up(turn, [])
                raise
            shares: list[list[str]] = []
            try:
                shares = await self.choose()
                made = BatchData({_SHARES: ObjectColumn.from_values([shares])})
                await self._plane.put(draws, [turn], made, tags=[{_BY: ""}])
            except BaseException:
                await self._give_up(turn, [key for share in shares for key in share])
                raise
            return shares

    async def _give_up(self, turn: str, keys: list[str]) -> None:
        """Let another process choose, also these rows, if this one still has the turn.

        A put without an answer may have been made: then the choice is stored, and others read it.
        """
        wanted, draws = self._settings, draws_of(self._settings.partition)
        try:
            await self._plane.put(draws, [turn], tags=[{_BY: ""}], expect=[{_BY: self._me}])
        except ConflictError:
            return
        await self._plane.clear(draws, [turn])
        await self._plane.reset_consumption(wanted.partition, task=wanted.task, keys=keys)

    async def _wait(self, partition: str, version: int, state: str, where: Mapping[str, Scalar] | None = None) -> int:
        """Wait for a change after `version`; return the new version. Version 0 returns at once."""
        left, wanted = seconds_until(self._deadline), self._settings
        if self._on_wait is not None:
            self._on_wait(
                f"{counted(wanted.count, 'unit')} with columns {list(wanted.fields)} could not be drawn: {state}"
            )
        changes = await self._plane.watch(partition, since=version, where=where, timeout_s=left)
        if changes.version == version and version and not seconds_until(self._deadline):
            raise PlaneTimeout(
                f"Task {wanted.task!r} could not draw {counted(wanted.count, 'unit')} with columns {list(wanted.fields)} from "
                f"partition {wanted.partition!r} within {wanted.timeout_s:g} s: {state}. Raise the deadline, or check "
                "the processes that write them."
            )
        return changes.version
