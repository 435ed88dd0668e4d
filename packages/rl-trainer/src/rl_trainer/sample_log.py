"""What the policy wrote and how it was judged, for people to read: JSONL, written beside the loop and never in its way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from rl_trainer.rewards.outcomes import Outcome

logger = logging.getLogger(__name__)


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One response."""

    key: str
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    outcome: Outcome
    """Numbers and texts, or why there are none."""


class SampleLog:
    """Writes a file `<step>.jsonl` per table into a folder, from a thread of its own.

    Lifecycle: made with a folder, which it makes; `write` as often as wanted; `close` waits for what is being written. A table that comes while
    another is still being written is left out; a table that can't be written is, too. Both are said in the log: a run does not end for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._last: Future[None] | None = None

    def write(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Have the table of this step written; returns at once."""
        if self._last is not None and not self._last.done():
            logger.warning("the samples of step %d are left out: those before are still being written", step)
            return
        self._last = self._thread.submit(self._write, step, rows)

    def close(self) -> None:
        """Wait for what is being written; safe to call twice."""
        self._thread.shutdown()

    def _write(self, step: int, rows: Sequence[SampleRow]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f".{step}"
            unfinished.write_bytes(msgspec.json.Encoder().encode_lines(rows))
            unfinished.rename(self._folder / f"{step}.jsonl")
        except OSError as error:
            logger.warning("the samples of step %d can't be written: %s", step, error)
