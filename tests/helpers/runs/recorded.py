"""Rows of a record."""

from __future__ import annotations

from rl_trainer.record.record_rows import TrajectoryRow


def trajectory(step: int, key: str = "p/0/0", at: float | None = None, *, tokens: int = 1) -> TrajectoryRow:
    """A trajectory of a step, with so many response tokens; written at `at`, or at its step."""
    return TrajectoryRow(
        at=float(step) if at is None else at,
        step=step,
        key=key,
        why="random",
        data_source="s",
        ground_truth="t",
        prompt="p",
        response="r",
        prompt_ids=[1],
        response_ids=[2] * tokens,
        response_mask=[1] * tokens,
        rollout_log_probs=[-0.5] * tokens,
        versions=[(0, tokens)],
    )
