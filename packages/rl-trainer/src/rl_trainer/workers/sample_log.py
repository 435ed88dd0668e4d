"""Writes validation responses and their scores to JSONL files, beside the training loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

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
    """Writes one file `<step>.jsonl` per table, from a separate thread.

    Lifecycle: `write` creates the folder; `close` waits for the last table. A table that arrives
    while another is being written is dropped, and so is a table that can't be written. Both are
    logged; neither ends the run.
    """

    def __init__(self, folder: Path, *, note: str = "") -> None:
        self._folder = folder
        self._note = note
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._last: Future[None] | None = None

    def write(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write the table of this step in the background."""
        if self._last is not None and not self._last.done():
            logger.warning("the samples of step %d are left out: those before are still being written", step)
            return
        self._last = self._thread.submit(self._write, step, rows)

    def flush(self) -> None:
        """Wait for the table that is being written."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for the table that is being written, and stop the thread; safe to call twice."""
        self._thread.shutdown()

    def _write(self, step: int, rows: Sequence[SampleRow]) -> None:
        name = str(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f".{name}"
            noted = [msgspec.structs.replace(row, note=self._note) for row in rows]
            unfinished.write_bytes(msgspec.json.Encoder().encode_lines(noted))
            unfinished.rename(self._folder / f"{name}.jsonl")
        except OSError as error:
            logger.warning("the samples of step %d can't be written: %s", step, error)
