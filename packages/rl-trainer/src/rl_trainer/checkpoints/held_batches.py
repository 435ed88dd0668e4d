"""Batches in a checkpoint that were sampled and are not trained yet.

held/
    batches.msgpack     HeldBatches
    train.batch         columns of the trajectories, in the wire format of rl_protocol.wire
    prompts.batch       columns of their prompts
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
    """The batch of a step."""

    step: int
    places: tuple[int, ...]
    """Of its prompts in the endless sequence."""
    prompts: tuple[tuple[str, int], ...]
    """Uid and row in the data set of all prompts that were rolled out for it."""
    keys: tuple[str, ...]
    """The trajectories to train on, in order."""
    metrics: dict[str, float]
    """Of its sampling."""

    @property
    def uids(self) -> Sequence[str]:
        """Prompts of the trajectories."""
        return list(dict.fromkeys(RowKey.parse(key).uid for key in self.keys))


class HeldBatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batches of the steps that follow a checkpoint, and the rows of their groups."""

    sessions: int
    """Responses per prompt."""
    batches: tuple[HeldBatch, ...]
    trajectories: tuple[SavedRows, ...]
    """All trajectories of the groups, also those without a score, which are not trained."""
    prompts: SavedRows

    def fault(self, step: int, files: Collection[str]) -> str:
        """What contradicts a checkpoint of this step with these files; empty: nothing."""
        steps = [batch.step for batch in self.batches]
        if steps != list(range(step + 1, step + 1 + len(steps))):
            return f"it has the batches of steps {steps}, which do not follow step {step}"
        named = {f"{HELD}/{rows.file}" for rows in (*self.trajectories, self.prompts) if rows.file}
        if absent := sorted(named - set(files)):
            return f"the manifest does not name {absent[0]}, which has rows of the batches"
        there = {key for rows in self.trajectories if rows.file for key in rows.keys}
        if lacking := [key for batch in self.batches for key in batch.keys if key not in there]:
            return f"no file has row {lacking[0]}"
        return ""
