"""What the driver says to workers and what they answer: names and numbers only, as msgspec structs."""

from __future__ import annotations

import msgspec

from rl_protocol import KVBatchMeta
from rl_protocol.ports import SamplingParams
from rl_trainer.checkpoints.folder import FileFacts


class PromptRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One prompt to be rolled out: its uid in this step and its row in the data set."""

    uid: str
    row: int


class RolloutCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generate `n` responses for each prompt and put them into `partition`."""

    partition: str
    split: str
    """Which data set the rows are of: train or val."""
    step: int
    prompts: tuple[PromptRef, ...]
    n: int
    sampling: SamplingParams


class StageCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run one stage over these rows."""

    step: int
    batch: KVBatchMeta
    mini_batches: tuple[tuple[int, ...], ...] | None = None
    """For one of several ranks in an update: places in `batch` of its rows in each optimizer step."""
    writes: bool = True
    """Whether what is computed is put into the plane: of ranks that compute the same, one does."""


class ReadAheadCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read what a stage will need; the call of the stage with these rows, which follows, computes with it."""

    stage: str
    batch: KVBatchMeta


class StageResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage reports."""

    metrics: dict[str, float] = {}


class RewardResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What scoring reports."""

    metrics: dict[str, float] = {}
    failed: tuple[str, ...] = ()
    """Keys of the trajectories that have no score, because the reward function failed on their session."""
    failure: str = ""
    """What the reward function did on the first of them, with file and line where it raised an exception; empty: it did not fail."""


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollout put into the plane."""

    trajectories: int
    tokens: int = 0
    """Of all their responses."""
    truncated: int = 0
    """Trajectories that ended because rollout.response_length was reached, and not with the end of sequence."""


class FilterResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prompts are worth training on."""

    uids: tuple[str, ...]


class SaveCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write the policy as a Hugging Face checkpoint."""

    path: str


class SaveStateCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy the state of this worker, and begin to write it into a checkpoint."""

    path: str
    """Folder of the checkpoint."""
    part: str
    """Folder below it of this worker's role."""


class FinishSaveCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer when everything is on the disk."""


class SavedFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker wrote, by path below the folder of the checkpoint."""

    files: dict[str, FileFacts]


class LoadStateCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Go on from the state in a folder."""

    path: str
