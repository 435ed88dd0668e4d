"""Writes responses and their scores to JSONL files for people to read, beside the training loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_protocol import KVBatchMeta
from rl_protocol.rl_columns import TRAIN_PARTITION
from rl_trainer.rewards.scorer import Outcome

logger = logging.getLogger(__name__)


class SampleRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of a sample file."""

    key: str
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    outcome: Outcome
    """The scores, or the failure of the reward function."""
    note: str = ""
    """A note on the task, the same in every row."""


class SampleLog:
    """Writes one file `<prefix><step>.jsonl` per table, from a separate thread.

    A second part of a step is `<prefix><step>-2.jsonl`.

    Lifecycle: `write` creates the folder; `close` waits for the last table. A table that arrives
    while another is being written is dropped, and so is a table that can't be written. Both are
    logged; neither ends the run.
    """

    def __init__(self, folder: Path, prefix: str = "", *, note: str = "") -> None:
        self._folder = folder
        self._prefix = prefix
        self._note = note
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._last: Future[None] | None = None

    def write(self, step: int, rows: Sequence[SampleRow], part: int = 1) -> None:
        """Write the table of this step, or a part of it, in the background."""
        if self._last is not None and not self._last.done():
            logger.warning("the samples of step %d are left out: those before are still being written", step)
            return
        self._last = self._thread.submit(self._write, step, rows, part)

    def flush(self) -> None:
        """Wait for the table that is being written."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for the table that is being written, and stop the thread; safe to call twice."""
        self._thread.shutdown()

    def _write(self, step: int, rows: Sequence[SampleRow], part: int) -> None:
        name = f"{self._prefix}{step}" if part == 1 else f"{self._prefix}{step}-{part}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f".{name}"
            noted = [msgspec.structs.replace(row, note=self._note) for row in rows]
            unfinished.write_bytes(msgspec.json.Encoder().encode_lines(noted))
            unfinished.rename(self._folder / f"{name}.jsonl")
        except OSError as error:
            logger.warning("the samples of step %d can't be written: %s", step, error)


@dataclass
class TrainSamples:
    """Writes training responses in every `every`-th step; 0: never."""

    log: SampleLog
    every: int
    _step: int = 0
    _parts: dict[str, int] = field(default_factory=dict[str, int])
    """First key of each part of that step -> number of the part."""

    def due(self, batch: KVBatchMeta, step: int) -> bool:
        """Whether these rows should be written."""
        return bool(self.every) and step % self.every == 0 and batch.partition == TRAIN_PARTITION

    def write(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write one part per round of filtering; a repeated round replaces its part."""
        if step != self._step:
            self._step, self._parts = step, {}
        part = self._parts.setdefault(rows[0].key if rows else "", len(self._parts) + 1)
        self.log.write(step, rows, part)
