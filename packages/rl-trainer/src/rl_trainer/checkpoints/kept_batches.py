"""The format of kept batches: what a step has trained on, and its results.

A batch is written to a hidden folder and then renamed, so a folder with the name of a step is
complete.

batches/step-000003/
    batch.json              KeptBatch; a number that is not finite is NaN, Infinity or -Infinity
    config.yaml             the configuration of the run
    rows.safetensors        columns of the trajectories; missing: the step had none
    prompts.safetensors     columns of their prompts

A dense column is a tensor of its name. A ragged or object column is its concatenated rows (objects
as msgpack, in bytes), with their offsets [N + 1] as the tensor `NAME/offsets`. The metadata
`columns` says what each is: JSON, name -> [kind, element type, ragged dimension].
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rl_protocol import BatchData, Column, ConfigError, DenseColumn, ObjectColumn, RaggedColumn, Scalar
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.disk_writes import fsync, write_errors
from rl_trainer.checkpoints.checkpoint_folder import CONFIG, FileFacts, facts, step_name, step_of
from rl_trainer.checkpoints.held_batches import SavedRows

FORMAT = 1
FACTS, ROWS, PROMPTS = "batch.json", "rows.safetensors", "prompts.safetensors"
_OFFSETS = "/offsets"
_COLUMNS = "columns"
writing = partial(
    write_errors,
    what="The batch of a step",
    remedy="Free some space, or lower LoopConfig.keep_batches.",
)
"""writing(path): a context that turns disk errors into OutputError; see write_errors."""


class KeptBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a step has trained on, and its results. Unknown keys are ignored."""

    format: int = FORMAT
    step: int
    version: int
    """Of the weights that it trained: number of actor updates before."""
    critic_updates: int
    """Updates of the critic before."""
    rows: SavedRows
    """The trajectories in the order of training; their tags have `prompt_len` and `response_len`.
    """
    prompts: SavedRows
    extra_info: dict[str, Scalar] = {}
    """Of the batch; see KVBatchMeta."""
    metrics: dict[str, float]
    """What the updates returned."""
    weights: dict[str, str]
    """SHA-256 of weights and optimizer state after the step, by role and rank, such as `actor/0`.
    """
    files: dict[str, FileFacts]


def write_columns(path: Path, data: BatchData) -> None:
    """Write columns as safetensors."""
    from safetensors.numpy import save_file  # needs the extra `torch`

    tensors, columns = dict[str, Any](), dict[str, tuple[str, str, int]]()
    for name, column in data.columns.items():
        tensors[name] = column.buffers[0]
        ragged_dim = column.ragged_dim if isinstance(column, RaggedColumn) else 0
        columns[name] = (column.kind, column.dtype, ragged_dim)
        if not isinstance(column, DenseColumn):
            tensors[f"{name}{_OFFSETS}"] = column.offsets
    save_file(tensors, path, metadata={_COLUMNS: json.dumps(columns)})


def read_columns(path: Path) -> BatchData:
    """Read what `write_columns` has written.

    Raises:
        ConfigError: it can't be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            columns: dict[str, tuple[str, str, int]] = json.loads((file.metadata() or {})[_COLUMNS])
            return BatchData({name: _column(file, name, *facts) for name, facts in columns.items()})
    except (SafetensorError, OSError, KeyError, *UNREADABLE) as error:
        raise ConfigError(f"The batch {path} can't be read: {error}.") from error


def _column(file: Any, name: str, kind: str, dtype: str, ragged_dim: int) -> Column:
    values = file.get_tensor(name)
    if kind == "dense":
        return DenseColumn(values, dtype)
    offsets = file.get_tensor(f"{name}{_OFFSETS}")
    return RaggedColumn(values, offsets, dtype, ragged_dim) if kind == "ragged" else ObjectColumn(values, offsets)


def unpublished(batches: Path, step: int) -> Path:
    """The folder in which the batch of a step is written."""
    return batches / f".saving-{step_name(step)}"


def publish(batches: Path, batch: KeptBatch, config: str, keep: int) -> None:
    """Turn the folder of a step into a kept batch, and remove those before the newest `keep` (-1:
    none).

    Raises:
        OutputError: it can't be written.
    """
    temporary, final = unpublished(batches, batch.step), batches / step_name(batch.step)
    with writing(final):
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / CONFIG).write_text(config, encoding="utf-8")
        files = {**batch.files, CONFIG: facts(temporary / CONFIG)}
        content = msgspec.to_builtins(msgspec.structs.replace(batch, files=files))
        (temporary / FACTS).write_text(json.dumps(content), encoding="utf-8")  # msgspec writes NaN as null
        for path in (temporary / CONFIG, temporary / FACTS, temporary):
            fsync(path)
        if final.exists():  # of an attempt that did not get as far as a checkpoint of the step
            shutil.rmtree(final)
        os.replace(temporary, final)  # noqa: PTH105 - Path.replace would hide that this is the atomic step
        fsync(batches)
        for step in superseded(kept_steps(batches), keep):
            shutil.rmtree(batches / step_name(step))


def superseded(steps: Sequence[int], keep: int) -> Sequence[int]:
    """The steps whose batches can be deleted, of ascending ones; see `publish`.

    >>> superseded([1, 2, 3], 2), superseded([1, 2, 3], -1)
    ([1], [])
    """
    return [] if keep < 0 else steps[: max(0, len(steps) - keep)]


def kept_steps(batches: Path) -> list[int]:
    """The steps whose batches are there, ascending."""
    return sorted(step for path in batches.glob("step-*") if (step := step_of(path.name)) is not None)


def drop_after(batches: Path, step: int) -> None:
    """Remove the batches of later steps, which a resumed run trains again, and unfinished ones.

    Raises:
        OutputError: the folder can't be written.
    """
    with writing(batches):
        for path in [*batches.glob(".saving-step-*"), *batches.glob("step-*")]:
            found = step_of(path.name)
            if found is None or found > step:
                shutil.rmtree(path)


def read_batch(batches: Path, step: int) -> KeptBatch:
    """Read the facts of a kept batch, after its files are verified.

    Raises:
        ConfigError: there is no such batch, or it is damaged.
    """
    folder = batches / step_name(step)
    try:
        batch = msgspec.convert(json.loads((folder / FACTS).read_bytes()), KeptBatch)
        wrong = [name for name, wanted in batch.files.items() if facts(folder / name) != wanted]
    except (OSError, ValueError, *UNREADABLE) as error:
        raise ConfigError(f"The batch {folder} can't be read: {error}.") from error
    if batch.format != FORMAT:
        raise ConfigError(f"The batch {folder} has the format {batch.format}, and this version reads {FORMAT}.")
    if wrong:
        raise ConfigError(f"The batch {folder} is damaged: {wrong[0]} is not what was written, its SHA-256 differs.")
    return batch


def columns_of(batches: Path, batch: KeptBatch) -> Mapping[str, BatchData]:
    """The columns of a kept batch, by file; none if the step had no rows.

    Raises:
        ConfigError: a file can't be read.
    """
    names = [rows.file for rows in (batch.rows, batch.prompts) if rows.file]
    return {name: read_columns(batches / step_name(batch.step) / name) for name in names}
