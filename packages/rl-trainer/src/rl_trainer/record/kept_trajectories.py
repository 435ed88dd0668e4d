"""Keeps the trajectories of a record: all, those of one step, or of evenly spread steps."""

from __future__ import annotations

from rl_trainer.record.record_rows import StartRow, TrajectoryRow


class KeptTrajectories:
    """Trajectories by step, in whatever order they and the starts of attempts are read.

    Args:
        most_tokens: response tokens to keep. Of more, only every second step is kept, then every
            fourth, and so on, and always the newest step; None: everything is kept.
        step: keep those of this step alone; None: of every step.

    Attributes:
        every: steps that are multiples of it are kept.
    """

    def __init__(self, most_tokens: int | None = None, *, step: int | None = None) -> None:
        self.every = 1
        self._only = step
        self._latest: dict[int, float] = {}
        """When the last trajectory of each step was written, kept or not."""
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
        self._latest[row.step] = max(row.at, self._latest.get(row.step, row.at))
        if self._is_forgotten(row.step, row.at) or self._only not in {None, row.step}:
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

    @property
    def steps(self) -> list[int]:
        """Every step that has trajectories, kept or not."""
        return sorted(step for step, at in self._latest.items() if not self._is_forgotten(step, at))

    def _is_forgotten(self, step: int, at: float) -> bool:
        """Whether a later attempt began before that step."""
        return any(at < start.at and step > start.after for start in self._starts)

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
