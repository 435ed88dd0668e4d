"""Questions about a plane that the compatible API asks and the port does not answer: which columns and tasks there are, and named rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rl_protocol.errors import MissingDataError
from rl_protocol.meta import KVBatchMeta
from rl_transferqueue.client import Client


def names_of(partition: str) -> str:
    """The partition that remembers which columns and tasks of a partition the compatible API was ever told of; it is never cleared."""
    return f"{partition}/names"


class Lookups:
    """Columns and tasks of partitions, as rows of `names_of`; each process writes a name once."""

    def __init__(self, plane: Client) -> None:
        self._plane = plane
        self._written: set[tuple[str, str]] = set()

    async def add(self, partition: str, kind: str, names: Iterable[str]) -> None:
        """Remember names of a kind: `field` or `task`."""
        new = [name for name in names if (partition, f"{kind}:{name}") not in self._written]
        if new:
            keys = [f"{kind}:{name}" for name in new]
            await self._plane.put(names_of(partition), keys, tags=[{"kind": kind, "name": name} for name in new])
            self._written |= {(partition, key) for key in keys}

    async def names(self, partition: str, kind: str) -> list[str]:
        """All names of a kind, the first told first."""
        rows = await self._plane.list_rows(names_of(partition), where={"kind": kind})
        return [str(name) for name in rows.tag_values("name")]

    async def rows(self, partition: str, keys: Sequence[str]) -> tuple[KVBatchMeta, list[str]]:
        """The named rows with tags, generations and the columns all of them have, and the columns that only some of them have.

        Raises:
            MissingDataError: a row that is not there.
        """
        listed = await self._plane.list_rows(partition)
        missing = sorted(set(keys) - set(listed.keys))
        if missing:
            raise MissingDataError(
                f"{len(missing)} rows are not in partition {partition!r}, the first is {missing[0]!r}."
            )
        names = list(dict.fromkeys((*listed.fields, *await self.names(partition, "field"))))
        status = await self._plane.production_status(partition, fields=names)
        mine = set(keys)
        has: list[list[bool]] = [f for key, f in zip(status.keys, status.flags.tolist(), strict=True) if key in mine]
        shared = [name for place, name in enumerate(names) if all(flags[place] for flags in has)]
        partly = [n for place, n in enumerate(names) if n not in shared and any(flags[place] for flags in has)]
        return replace(listed.select_keys(keys), fields=tuple(shared)), partly
