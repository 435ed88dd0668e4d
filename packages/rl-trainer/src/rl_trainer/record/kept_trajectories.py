"""Keeps the trajectories of a record, or those of evenly spread steps of a long one."""

from __future__ import annotations

from rl_trainer.record.record_rows import StartRow, TrajectoryRow


class KeptTrajectories:
    """Trajectories by step, in whatever order they and the starts of attempts are read.

    Args:
        most_tokens: response tokens to keep. Of more, only every second step is kept, then every
            fourth, and so on, and always the newest step; None: everything is kept.

    Attributes:
        every: steps that are multiples of it are kept.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self.every = 1
        self._most_tokens = most_tokens
        self._starts: list[StartRow] = []
        self._steps: dict[int, dict[str, TrajectoryRow]] = {}
        self._newest = 0
        """The newest step in `_steps`; looked for only when it is removed, not for each row."""
        self._tokens = 0

    def begin_again(self, start: StartRow) -> None:
        """An attempt begins: forget the steps after its checkpoint that were written before."""
        self._starts.append(start)
        for step in [step for step in self._steps if step > start.after]:
            for row in list(self._steps[step].values()):
                if row.at < start.at:
                    self._remove(row)

    def add(self, row: TrajectoryRow) -> None:
        """Keep a trajectory; of those with one step and key, the latest."""
        if any(row.at < start.at and row.step > start.after for start in self._starts):
            return
        newest = self._newest
        if row.step % self.every and row.step < newest:
            return
        old = self._steps.get(row.step, {}).get(row.key)
        if old is not None:
            if old.at > row.at:
                return
            self._remove(old)
        self._steps.setdefault(row.step, {})[row.key] = row
        self._newest = max(self._newest, row.step)
        self._tokens += len(row.response_ids)
        if row.step > newest > 0 and newest % self.every:
            self._drop(newest)
        self._thin()

    def rows(self) -> list[TrajectoryRow]:
        """Those that are kept, by time."""
        return sorted((row for rows in self._steps.values() for row in rows.values()), key=lambda row: row.at)

    def _thin(self) -> None:
        while self._most_tokens is not None and self._tokens > self._most_tokens and len(self._steps) > 1:
            self.every *= 2
            for step in [step for step in self._steps if step % self.every and step != self._newest]:
                self._drop(step)

    def _drop(self, step: int) -> None:
        for row in list(self._steps[step].values()):
            self._remove(row)

    def _remove(self, row: TrajectoryRow) -> None:
        rows = self._steps[row.step]
        self._tokens -= len(rows.pop(row.key).response_ids)
        if not rows:
            del self._steps[row.step]
            if row.step == self._newest:
                self._newest = max(self._steps, default=0)
