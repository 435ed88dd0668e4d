"""Payloads of a step: families of rows, scaled to a number of bytes.

Legend: N rows, R response tokens, P prompt tokens. `padded` columns are dense, every row
right-padded to the longest that the family allows; `ragged` columns hold the same rows without the
padding. The writer of a column makes both, so every plane moves the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rl_protocol import BatchData, BatchSchema, ColumnSpec, DenseColumn, ObjectColumn, RaggedColumn, RowKey
from rl_protocol.batch.columns import AnyArray, Column, offsets_from_lengths
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.rl_columns import PROMPT_SCHEMA
from rl_trainer.workers.columns import TRAINER_SCHEMA

Layout = Literal["padded", "ragged"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
VERSIONS = "rollout_versions"
"""Here one version of the weights generates each response."""
VOCABULARY = 64
SESSIONS = 8
"""Responses per prompt, as in the published runs (global batch 128 x 8)."""
ROWS_STEP = 16
"""Rows come in multiples of this: equal shares for up to 16 workers, whole prompts."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of workload; lengths are upper bounds, rows get a quarter of them to all of them.

    Attributes:
        name: short name.
        about: where the numbers come from, and how they were scaled.
        prompt, response: tokens.
        extra: what the rollout writes besides tokens, ragged; models read it wherever they run.
        items: rows of `extra` values per trajectory; 0: one per token of prompt and response.
    """

    name: str
    about: str
    prompt: int
    response: int
    extra: tuple[ColumnSpec, ...] = ()
    items: int = 0

    def width(self, column: str) -> int:
        """Most elements a row of a ragged column may have."""
        if column in (spec.name for spec in self.extra):
            return self.items or self.prompt + self.response
        if column == VERSIONS:
            return 1
        return self.prompt if column == "prompts" else self.response

    @property
    def extra_schema(self) -> BatchSchema:
        """The columns that the trainer's own schemas do not know."""
        return BatchSchema(self.extra)

    def spec(self, column: str) -> ColumnSpec:
        """Kind, element type and shape of a column."""
        schemas = (TRAINER_SCHEMA, PROMPT_SCHEMA, self.extra_schema)
        return next(schema[column] for schema in schemas if column in schema)

    def row_bytes(self, columns: tuple[str, ...]) -> int:
        """Bytes of one padded row of these columns; strings are not counted."""
        return sum(self._column_bytes(self.spec(name)) for name in columns)

    def _column_bytes(self, spec: ColumnSpec) -> int:
        if spec.kind == "object":
            return 0
        items = self.width(spec.name) if spec.kind == "ragged" else 1
        return items * int(np.prod(spec.dims, dtype=np.int64)) * storage_dtype(spec.dtype).itemsize


CHOSEN_EXPERTS = ColumnSpec(
    name="chosen_experts",
    kind="ragged",
    dtype="uint8",
    dims=(48, 8),
    writer="rollout",
    meaning="experts chosen in each of 48 layers, 8 of 128",
)
PIXEL_VALUES = ColumnSpec(
    name="pixel_values",
    kind="ragged",
    dtype="bfloat16",
    dims=(1536,),
    writer="rollout",
    meaning="patches of 2 x 3 x 16 x 16 values",
)
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(name="text", about="2K prompt, 8K response, unscaled rows", prompt=2048, response=8192),
        Family(
            name="moe",
            about="routing replay of 48 layers x 8 experts per token; 2K/8K scaled by 1/4",
            prompt=512,
            response=2048,
            extra=(CHOSEN_EXPERTS,),
        ),
        Family(
            name="vl",
            about="16K prompt, 2K response scaled by 1/8; up to 512 image patches per row",
            prompt=2048,
            response=256,
            extra=(PIXEL_VALUES,),
            items=512,
        ),
        Family(
            name="tiny",
            about="every kind of column, a few KiB: for tests and smoke runs",
            prompt=8,
            response=16,
            extra=(CHOSEN_EXPERTS, PIXEL_VALUES),
            items=4,
        ),
    )
}


def rows_for(family: Family, columns: tuple[str, ...], nbytes: int) -> int:
    """Number of rows whose padded columns come closest to `nbytes`, a multiple of ROWS_STEP."""
    return max(1, round(nbytes / family.row_bytes(columns) / ROWS_STEP)) * ROWS_STEP


def row_keys(step: int, rows: int) -> list[str]:
    """Names of the trajectories of a step: prompts of SESSIONS responses each."""
    return [RowKey(f"s{step}-{row // SESSIONS}", row % SESSIONS).text for row in range(rows)]


def row_lengths(family: Family, rows: int, seed: int) -> dict[str, npt.NDArray[np.int64]]:
    """[N] lengths of prompts, responses and extra columns; deterministic."""
    rng = np.random.default_rng((seed, rows))

    def draw(width: int) -> npt.NDArray[np.int64]:
        return rng.integers(max(1, width // 4), width + 1, rows)

    lengths = {
        "prompts": np.repeat(draw(family.prompt)[::SESSIONS], SESSIONS)[:rows],
        "responses": draw(family.response),
        VERSIONS: np.ones(rows, np.int64),
    }
    per_token = lengths["prompts"] + lengths["responses"]
    return lengths | {spec.name: draw(family.items) if family.items else per_token for spec in family.extra}


def lay_out(column: Column, layout: Layout, width: int) -> Column:
    """A ragged column in the layout; other columns unchanged."""
    if isinstance(column, RaggedColumn) and layout == "padded":
        return DenseColumn(column.padded(width), column.dtype)
    return column


def random_values(spec: ColumnSpec, items: int, rng: np.random.Generator) -> AnyArray:
    """Finite values [items, *dims] in the storage type of the column."""
    shape = (items, *spec.dims)
    if spec.dtype == "bfloat16":
        return (rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if spec.dtype == "float32":
        return -rng.random(shape, np.float32)
    if spec.dtype == "bool":
        return np.ones(shape, np.bool_)
    return rng.integers(0, VOCABULARY, shape, dtype=storage_dtype(spec.dtype))


def one_version(lengths: npt.NDArray[np.int64]) -> AnyArray:
    """VERSIONS of responses of these lengths [N], int32 [N, 2]."""
    return np.stack([np.zeros_like(lengths), lengths], axis=1).astype(np.int32)


def rollout_batch(
    family: Family,
    columns: tuple[str, ...],
    lengths: Mapping[str, npt.NDArray[np.int64]],
    rows: range,
    layout: Layout,
    seed: int,
) -> BatchData:
    """Random rollout columns for these rows."""
    rng = np.random.default_rng((seed, rows.start))
    out: dict[str, Column] = {}
    for name in columns:
        spec = family.spec(name)
        if spec.kind == "object":
            out[name] = ObjectColumn.from_values([f"{name} {row // SESSIONS}" for row in rows])
            continue
        count = lengths[name if name in lengths else "responses"][rows.start : rows.stop]
        offsets = offsets_from_lengths(count)
        tokens = lengths["responses"][rows.start : rows.stop]
        values = one_version(tokens) if name == VERSIONS else random_values(spec, int(offsets[-1]), rng)
        out[name] = lay_out(RaggedColumn(values, offsets, spec.dtype), layout, family.width(name))
    return BatchData(out)
