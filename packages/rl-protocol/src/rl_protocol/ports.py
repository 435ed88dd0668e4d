"""Ports: what the parts of the system are to each other. The trainer is written against these; the app plugs concrete classes in.

Every port that does I/O is async, takes a deadline in seconds on every call, and raises errors of `rl_protocol.errors` only.
Implementations must pass the conformance suites of `rl_protocol.testing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.batch import BatchData
from rl_protocol.draft import Draft
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.schema import ColumnSpec
from rl_protocol.weights import WeightTensor

# ---------------------------------------------------------------------------------------------------------------- data plane


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that went through one client since it was opened."""

    control_sent: int = 0
    control_received: int = 0
    data_written: int = 0
    """Payload bytes this client put."""
    data_read: int = 0
    """Payload bytes this client got."""

    @property
    def total(self) -> int:
        return self.control_sent + self.control_received + self.data_written + self.data_read


class PlaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a plane holds now."""

    rows: Mapping[str, int]
    """partition -> number of rows."""
    bytes_used: int
    """Bytes of payload held, alignment included."""
    bytes_capacity: int
    """Most bytes it may hold; 0: no bound."""
    bytes_reserved: int = 0
    """Bytes given to producers for what they have not put yet."""
    lost: Mapping[str, tuple[str, ...]] = {}
    """partition -> keys of rows that are still named but lost columns with a storage unit that died."""
    columns: Mapping[str, tuple[str, ...]] = {}
    """partition -> columns that some row has or had."""
    tasks: Mapping[str, tuple[str, ...]] = {}
    """partition -> tasks that consumed rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChanges:
    """What happened to the rows of a partition after some version."""

    rows: KVBatchMeta
    """Rows that are new or changed, least recent change first."""
    removed: tuple[str, ...]
    """Rows that were cleared, or changed and do not have the tags asked for; not all need have been known to the asker."""
    version: int
    """Ask for what comes after this next time."""
    reset: bool
    """`rows` are all rows there are: forget all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFlags:
    """A yes or no for every row of a partition, oldest row first."""

    keys: tuple[str, ...]
    flags: npt.NDArray[np.bool_]
    """bool [N], or [N, F] for F columns."""


@runtime_checkable
class DataPlane(Protocol):
    """Rows of named columns, addressed by partition and key.

    A row comes to be with the first put that names its key and grows by later puts (columns arriving from other workers); a column put
    again replaces the former one; tags are merged, the later value wins. A put is all or nothing. Reads are strict.
    """

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | Draft | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        expect: Sequence[Tag | None] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Store columns and tags of the rows named by `keys` [N]; `data` has N rows in that order, or is None for tags alone.

        Args:
            partition: the partition the rows are in.
            keys: names of the rows.
            data: their columns; a draft made by `alloc` is taken as it is and can't be used again.
            tags: [N] facts to merge into those the rows have; a number may be infinite and not NaN, which equals nothing.
            expect: [N] tags that the rows must have at this moment; None: that row must not be there.
            timeout_s: deadline.

        Returns:
            The rows with the tags and columns given in this call.

        Raises:
            BatchError: `data` or `tags` do not have one row per key, or a tag has a value that none may have; names row and tag.
            DuplicateKeyError: a key occurs twice.
            ConflictError: a row is not as expected; nothing was stored.
            CapacityTimeout: no room until the deadline; nothing was stored.
            PlaneTimeout, PlaneLostError: as their names say; the put may be repeated, it is idempotent.
        """
        ...

    async def alloc(
        self,
        columns: Iterable[ColumnSpec],
        rows: int,
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Draft:
        """Memory of the plane for columns of `rows` rows, to be filled in place and then put without a copy.

        Args:
            columns: what to make room for; no object columns, their size is not known.
            rows: number of rows N.
            lengths: [N] row lengths of every ragged column.
            timeout_s: deadline.

        Raises:
            BatchError: lengths that do not fit, or an object column.
            CapacityTimeout: no room until the deadline.
        """
        ...

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> BatchData:
        """Columns `fields` (default: `meta.fields`) of the rows, in the order of `meta.keys`.

        Raises:
            MissingDataError: names the rows or columns that are not there; nothing partial is returned. A row that was made anew
                since `meta` was described is not there.
            DataLostError: they were lost with the storage unit that held them.
        """
        ...

    async def wait_ready(
        self,
        partition: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Mapping[str, Scalar] | None = None,
        task: str | None = None,
        timeout_s: float,
    ) -> KVBatchMeta:
        """Wait, without polling, until `count` rows have all `fields` and all tags of `where`; return the `count` oldest of them.

        With `task`, rows handed out are marked consumed by that task and never handed to it again, whichever client asks.

        Raises:
            PlaneTimeout: says how many rows were ready.
        """
        ...

    async def claim(self, partition: str, keys: Sequence[str], *, task: str, timeout_s: float = 60.0) -> KVBatchMeta:
        """Mark exactly these rows as consumed by `task`: what a sampler does with the rows it has chosen. All or nothing.

        Raises:
            ConflictError: one of them is consumed already; names it.
            MissingDataError: one of them is not there.
        """
        ...

    async def list_rows(
        self,
        partition: str,
        *,
        where: Mapping[str, Scalar] | None = None,
        fields: Sequence[str] = (),
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """The rows that have the tags of `where`, all `fields`, and are not consumed by `task`; oldest first. Nothing is consumed.

        With `keys` only those rows are looked at, and the result has their order. `fields` of the result are those that every row has.

        Raises:
            MissingDataError: one of `keys` is not there.
        """
        ...

    async def watch(
        self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
    ) -> RowChanges:
        """Wait, without polling, until rows of the partition change after version `since`; return the changes.

        `since=0` returns all rows at once. A deadline that passes is no error: nothing changed, and the version is the same.
        """
        ...

    async def consumption_status(self, partition: str, *, task: str, timeout_s: float = 60.0) -> RowFlags:
        """Which rows were handed out for `task`: flags [N]."""
        ...

    async def production_status(self, partition: str, *, fields: Sequence[str], timeout_s: float = 60.0) -> RowFlags:
        """Which rows have which of the columns: flags [N, F]."""
        ...

    async def reset_consumption(
        self,
        partition: str,
        *,
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> int:
        """Let rows (default: all) be handed out again for `task` (default: every task); returns how many had been consumed."""
        ...

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
        """Remove the named rows, or the whole partition; returns how many were there. Rows that are gone already are no error."""
        ...

    async def stats(self, *, timeout_s: float = 60.0) -> PlaneStats:
        """What the plane holds now."""
        ...

    def traffic(self) -> Traffic:
        """Bytes moved by this client so far."""
        ...

    async def close(self) -> None:
        """Release what this client holds; safe to call twice. The plane itself lives on."""
        ...


# ---------------------------------------------------------------------------------------------------------------- weights


@runtime_checkable
class WeightSender(Protocol):
    """Whoever has the newest weights."""

    def named_weights(self) -> Iterable[WeightTensor]:
        """Every parameter and buffer the rollout engine needs, under Hugging Face names, in a fixed order."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """Whoever generates with weights made elsewhere."""

    @property
    def weight_version(self) -> int:
        """Version of the active weights."""
        ...

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Copy verified weights in and make them active as `version`.

        Raises:
            WeightSyncError: a name, shape or element type the engine does not have, or one that is missing; the old weights stay.
        """
        ...


class WeightSyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one synchronisation did."""

    version: int
    num_bytes: int
    seconds: float
    receivers: tuple[str, ...]
    """Names of the replicas that activated the version."""


@runtime_checkable
class WeightSync(Protocol):
    """Brings the trainer's weights to every rollout replica."""

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send, verify and activate `version` everywhere.

        Raises:
            WeightSyncError: no replica could activate it; names each and why.
        """
        ...


# ---------------------------------------------------------------------------------------------------------------- rollout


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    ignore_eos: bool = False
    """Generate exactly max_new_tokens."""
    seed: int = 0
    """Run seed; each request's stream is derived from (seed, uid, session)."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a prompt, as the image processor of its model cut it."""

    pixel_values: npt.NDArray[np.float32]
    """[patches, numbers of a patch]."""
    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width; their product is the number of patches."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One response to be generated."""

    uid: str
    session: int
    prompt_ids: tuple[int, ...]
    """[P] token ids, P >= 1; of images, the model's image token for every piece."""
    images: tuple[ImageInput, ...] = ()
    """In the order of the prompt."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One generated response."""

    response_ids: tuple[int, ...]
    """[R] token ids, the end-of-sequence token included when it was generated."""
    log_probs: tuple[float, ...]
    """[R] natural log-probability of each token under softmax(logits / temperature) (temperature 1 when greedy), before top-p and top-k."""
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int


@runtime_checkable
class RolloutEngine(WeightReceiver, Protocol):
    """Generates token ids from token ids."""

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """One generation per request, in order. The result does not depend on how requests are batched.

        Raises:
            RolloutError: names the request that can't be served (prompt empty or longer than the context, images that the engine does not take).
        """
        ...


# ---------------------------------------------------------------------------------------------------------------- training


@runtime_checkable
class PolicyBackend(WeightSender, Protocol):
    """A policy under training."""

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """Reads `prompts`, `responses`, and columns of images where there are any; returns ragged float32 columns `log_probs` and `entropy`, one
        value per response token."""
        ...

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """One optimisation over the batch (epochs and minibatches as configured); returns plain-float metrics."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write the policy as a Hugging Face checkpoint folder."""
        ...


@runtime_checkable
class CriticBackend(Protocol):
    """A value function under training."""

    def compute_values(self, batch: BatchData) -> BatchData:
        """Reads `prompts`, `responses`; returns the ragged float32 column `values`: V(s_t) before each response token is taken."""
        ...

    def update(self, batch: BatchData) -> dict[str, float]:
        """One optimisation over the batch; returns plain-float metrics."""
        ...


@runtime_checkable
class RewardFunction(Protocol):
    """Scores one response. Same call as verl's `compute_score`."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
    ) -> float | Mapping[str, float]:
        """A finite score, or a mapping with `score` and further named numbers such as `acc`."""
        ...


@runtime_checkable
class MetricSink(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is buffered; safe to call twice."""
        ...
