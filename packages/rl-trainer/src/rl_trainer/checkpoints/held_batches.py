"""Batches in a checkpoint that were sampled and are not trained yet.

held/
    batches.msgpack     HeldBatches
    train.batch         columns of the trajectories, in the wire format of rl_protocol.wire
    prompts.batch       columns of their prompts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from rl_protocol import RowKey, Tag

HELD = "held"
"""Folder below that of the checkpoint."""
INDEX = f"{HELD}/batches.msgpack"


class SavedRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one partition, and the file with their columns."""

    partition: str
    keys: tuple[str, ...]
    tags: tuple[Tag, ...] = ()
    """[N], or empty if the rows have no tags."""
    file: str = ""
    """Name in the folder `held`; empty: the rows are restored without columns."""


class HeldBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batch of a turn; see StalenessPolicy."""

    turn: int
    places: tuple[int, ...]
    """Of its prompts in the endless sequence."""
    prompts: tuple[tuple[str, int], ...]
    """Uid and row in the data set of all prompts that were rolled out for it and not dropped."""
    keys: tuple[str, ...]
    """The trajectories to train on, in order."""
    metrics: dict[str, float]
    """Of its sampling."""
    scores: dict[str, tuple[float, float]] = {}
    """Mean and variance of the scores of each prompt, by uid."""
    sessions: dict[str, int] = {}
    """Responses to the prompts that do not have `HeldBatches.sessions`, by uid."""

    @property
    def uids(self) -> Sequence[str]:
        """Prompts of the trajectories."""
        return list(dict.fromkeys(RowKey.parse(key).uid for key in self.keys))


class HeldBatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches that were sampled and not trained at a checkpoint, and the rows of their groups."""

    step: int
    """Of the checkpoint."""
    sessions: int
    """Responses per prompt."""
    batches: tuple[HeldBatch, ...]
    trajectories: tuple[SavedRows, ...]
    """All trajectories of the groups, also those without a score, which are not trained."""
    prompts: SavedRows
    turns_per_step: int = 1
    """Of the StalenessPolicy that numbered the turns."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of the oldest trajectory of each group, by uid."""
        found: dict[str, int] = {}
        for rows in self.trajectories:
            for tag in rows.tags:
                uid, version = str(tag["uid"]), int(tag["version"] or 0)
                found[uid] = min(version, found.get(uid, version))
        return found

    def fault(self, step: int, files: Collection[str]) -> str:
        """What contradicts a checkpoint of this step with these files; empty: nothing."""
        turns = [batch.turn for batch in self.batches]
        if self.step != step or turns != sorted(set(turns)):
            return f"it has the batches of turns {turns} after step {self.step}, which do not follow step {step}"
        named = {f"{HELD}/{rows.file}" for rows in (*self.trajectories, self.prompts) if rows.file}
        if absent := sorted(named - set(files)):
            return f"the manifest does not name {absent[0]}, which has rows of the batches"
        there = {key for rows in self.trajectories if rows.file for key in rows.keys}
        if lacking := [key for batch in self.batches for key in batch.keys if key not in there]:
            return f"no file has row {lacking[0]}"
        return ""
