"""Messages from the driver to workers and their answers: names and numbers only, as msgspec
structs.
"""

from __future__ import annotations

import msgspec

from rl_protocol import KVBatchMeta
from rl_protocol.ports import Lease, SamplingParams
from rl_trainer.checkpoints.checkpoint_folder import FileFacts
from rl_trainer.checkpoints.held_batches import SavedRows


class PromptRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt to roll out: its uid in this step and its row in the data set."""

    uid: str
    row: int
    sessions: int | None = None
    """Its responses; None: as many as the partition says."""


class ComputeCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process reads of every call that computes with a model, before its handler."""

    side_by_side: int = 0
    """Processes that compute at the same time and share the cores, with this one; 0: not said."""


class Partition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the trajectories of one step go, and how they are sampled."""

    name: str
    """Name of the partition in the data plane."""
    split: str
    """Data set of the prompts: train or val."""
    step: int
    n: int
    """Responses per prompt, of prompts that do not say otherwise."""
    sampling: SamplingParams


class LeasedPrompt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt to roll out: the lease of its sessions, and its row in the data set."""

    lease: Lease
    row: int


class RolloutCall(ComputeCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run and settle the sessions of each prompt."""

    partition: Partition
    prompts: tuple[LeasedPrompt, ...]


class StageCall(ComputeCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run one stage over these rows."""

    step: int
    batch: KVBatchMeta
    mini_batches: tuple[tuple[int, ...], ...] | None = None
    """For one of several ranks in an update: its rows in each optimizer step, as places in `batch`.
    """
    updates: int = 0
    """Updates of the model before this one; for the actor the version of the weights that it
    trains.
    """


class ReadAheadCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read the rows of a stage ahead, for the call of the stage with these rows that follows."""

    stage: str
    batch: KVBatchMeta


class StageResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a stage."""

    metrics: dict[str, float] = {}


class RewardResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of scoring."""

    metrics: dict[str, float] = {}
    sizes: dict[str, int] = {}
    """How many numbers a mean in `metrics` is of, by name; of others as many as rows."""
    failed: tuple[str, ...] = ()
    """Keys of the trajectories without a score, because the reward function failed on their
    session.
    """
    failure: str = ""
    """How the reward function failed on the first of them, with file and line of an exception;
    empty: it did not fail.
    """
    prompt_scores: dict[str, tuple[float, float]] = {}
    """Mean and variance of the scores of the sessions of each prompt, by uid; in training only."""


class ValidationResult(RewardResult, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a validation."""

    accuracy: float | None = None
    """By which checkpoints are compared: `rewards.validation_metrics.mean_accuracy`."""


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a rollout, whose sessions are settled."""

    tokens: int = 0
    """Response tokens of all trajectories."""
    single: bool = False
    """Every session ended with one trajectory."""


class FilterResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts that are worth training on."""

    uids: tuple[str, ...]


class SaveCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write the policy as a Hugging Face checkpoint."""

    path: str


class SaveStateCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy the state of this worker, and begin to write it to a checkpoint."""

    path: str
    """Folder of the checkpoint."""
    part: str
    """Folder of this worker's role, below that of the checkpoint."""


class FinishSaveCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wait until everything is on disk."""


class SavedFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that a worker wrote, by path below the folder of the checkpoint."""

    files: dict[str, FileFacts]


class LoadStateCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Restore the state from a folder."""

    path: str


class CopyRowsCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read these rows from the data plane, and write them with the save that follows."""

    rows: tuple[SavedRows, ...]


class KeepRowsCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write these rows of the data plane to files, as safetensors."""

    path: str
    """Folder of the files, which replaces one that is there."""
    rows: tuple[SavedRows, ...]


class StateDigestCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compute the digest of weights and optimizer state."""


class StateDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SHA-256 of weights and optimizer state of a rank."""

    sha256: str


class PutRowsCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Put rows of a checkpoint or of a kept batch into the data plane."""

    path: str
    """Folder of their files."""
    rows: tuple[SavedRows, ...]
