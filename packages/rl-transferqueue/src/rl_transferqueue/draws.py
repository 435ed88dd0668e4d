"""Draw batches from a plane with a sampler: every row goes to one batch of a task, and ranks agree on the batches without talking to each other.

A draw has a *turn*: the number of the batch. Whoever comes first for a turn chooses for all ranks, the others are told; the choice is a row of the
partition `<partition>/draws`, so that it also outlives its maker. Without a turn a draw is the caller's alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rl_protocol.batch import BatchData
from rl_protocol.columns import ObjectColumn
from rl_protocol.errors import ConflictError, MissingDataError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta, Scalar
from rl_protocol.ports import DataPlane
from rl_transferqueue.samplers import Sampler

_SHARES = "shares"


def draws_of(partition: str) -> str:
    """The partition that holds the draws of a partition; clear it together with that."""
    return f"{partition}/draws"


async def draw(
    plane: DataPlane,
    sampler: Sampler,
    partition: str,
    *,
    task: str,
    count: int,
    fields: Sequence[str] = (),
    where: Mapping[str, Scalar] | None = None,
    turn: str | None = None,
    timeout_s: float,
) -> list[KVBatchMeta]:
    """Rows for every rank, chosen by `sampler` among those that have all `fields` and all tags of `where`, and marked consumed by `task`.

    Args:
        plane: where the rows are.
        sampler: see `Sampler`.
        partition: of the rows.
        task: whoever must not be handed a row twice.
        count: see `Sampler.sample`.
        fields: columns the rows must have.
        where: tags the rows must have.
        turn: names the batch; all who ask for the same turn of a task get the same rows.
        timeout_s: seconds.

    Raises:
        PlaneTimeout: the sampler found too little until the deadline, or whoever chooses for this turn did not.
    """
    wish = _Wish(plane, sampler, partition, task, count, tuple(fields), where, timeout_s)
    shares = await (wish.choose() if turn is None else wish.agree(f"{task}/{turn}"))
    return [KVBatchMeta(partition=partition, keys=tuple(keys), fields=tuple(fields)) for keys in shares]


class _Wish:
    """One call of `draw`."""

    def __init__(
        self,
        plane: DataPlane,
        sampler: Sampler,
        partition: str,
        task: str,
        count: int,
        fields: tuple[str, ...],
        where: Mapping[str, Scalar] | None,
        timeout_s: float,
    ) -> None:
        self._plane = plane
        self._sampler = sampler
        self._partition = partition
        self._task = task
        self._count = count
        self._fields = fields
        self._where = where
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s

    def _left(self) -> float:
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def choose(self) -> list[list[str]]:
        """Choose among the ready rows, as soon as there are enough, and claim them."""
        version = 0
        while True:
            ready = await self._plane.list_rows(
                self._partition, where=self._where, fields=self._fields, task=self._task
            )
            shares = [[ready.keys[row] for row in share] for share in self._sampler.sample(ready, self._count)]
            if any(shares):
                try:
                    await self._plane.claim(
                        self._partition, [key for share in shares for key in share], task=self._task
                    )
                except (ConflictError, MissingDataError):  # somebody was faster: look again
                    continue
                return shares
            version = await self._change(self._partition, version, f"{len(ready)} rows were ready")

    async def agree(self, turn: str) -> list[list[str]]:
        """Be the one who chooses for this turn, or hear what was chosen."""
        draws, version = draws_of(self._partition), 0
        while True:
            try:
                await self._plane.put(draws, [turn], tags=[{"turn": turn}], expect=[None])
            except ConflictError:
                try:
                    made = await self._plane.get(KVBatchMeta(partition=draws, keys=(turn,)), [_SHARES])
                    return made.objects(_SHARES).row(0)
                except MissingDataError:
                    version = await self._change(draws, version, "somebody else is choosing", {"turn": turn})
                    continue
            try:
                shares = await self.choose()
                await self._plane.put(draws, [turn], BatchData({_SHARES: ObjectColumn.from_values([shares])}))
            except BaseException:
                await self._plane.clear(draws, [turn])  # another may choose
                raise
            return shares

    async def _change(self, partition: str, version: int, state: str, where: Mapping[str, Scalar] | None = None) -> int:
        """Wait until something changes after `version`; returns the new version. The first call (version 0) returns at once."""
        left = self._left()
        changes = await self._plane.watch(partition, since=version, where=where, timeout_s=left)
        if changes.version == version and version and not self._left():
            raise PlaneTimeout(
                f"Task {self._task!r} could not draw {self._count} units with columns {list(self._fields)} from partition "
                f"{self._partition!r} within {self._timeout_s:g} s: {state}. Raise the deadline or look at who should write them."
            )
        return changes.version
