"""Check, before a job starts, that every column a step reads is written by an earlier step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rl_protocol.errors import ConfigError


class Step(Protocol):
    """One step of a job: it reads existing columns and writes new ones."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Sequence[str]: ...
    @property
    def writes(self) -> Sequence[str]: ...


def check_flow(steps: Iterable[Step], given: Sequence[str] = ()) -> None:
    """Check that each column a step reads exists by then, and that none is written twice.

    Args:
        steps: the steps in execution order.
        given: columns that exist before the first step.

    Raises:
        ConfigError: names the step and the column.
    """
    writer = dict.fromkeys(given, "")
    for step in steps:
        for column in step.reads:
            if column not in writer:
                raise ConfigError(
                    f"Step {step.name!r} reads column {column!r}, which no earlier step writes; there are {sorted(writer)}."
                )
        for column in step.writes:
            if column in writer:
                by = f"by step {writer[column]!r}" if writer[column] else "before the first step"
                raise ConfigError(f"Step {step.name!r} writes column {column!r}, which is written {by} already.")
            writer[column] = step.name
