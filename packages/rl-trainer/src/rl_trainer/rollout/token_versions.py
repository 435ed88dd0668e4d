"""Versions of the weights that generated the tokens of a trajectory, as runs of equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rl_protocol import RolloutError

VersionRuns = tuple[tuple[int, int], ...]
"""(version, tokens) of consecutive tokens, in order."""


def version_runs(versions: Sequence[int | None]) -> VersionRuns:
    """The runs of per-token versions.

    None is a token that the policy did not generate: it belongs to the run before it, and before
    the first one to that.

    >>> version_runs([None, 3, 3, None, 4])
    ((3, 4), (4, 1))
    """
    known = next((version for version in versions if version is not None), None)
    filled: list[int | None] = []
    for version in versions:
        known = known if version is None else version
        filled.append(known)
    return tuple((version, len(list(run))) for version, run in groupby(filled) if version is not None)


def joined_runs(parts: Iterable[tuple[int, int]]) -> VersionRuns:
    """The runs of parts (version, tokens), of which neighbours may have the same version.

    >>> joined_runs([(3, 2), (3, 1), (4, 0), (4, 1)])
    ((3, 3), (4, 1))
    """
    runs: list[tuple[int, int]] = []
    for version, tokens in parts:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + tokens)
        elif tokens:
            runs.append((version, tokens))
    return tuple(runs)


def check_runs(runs: VersionRuns, tokens: int, oldest: int, where: str) -> None:
    """Check that runs are those of a trajectory.

    Args:
        runs: the runs.
        tokens: of the trajectory after its prompt.
        oldest: its oldest version.
        where: the trajectory, for messages.

    Raises:
        RolloutError: a version is unknown, or the runs do not fit the tokens or the oldest version.
    """
    if oldest < 0 or any(version < 0 for version, _ in runs):
        raise RolloutError(f"{where} has weight_version={oldest} and versions={runs}; a version is at least 0.")
    if sum(length for _, length in runs) != tokens or min((version for version, _ in runs), default=oldest) != oldest:
        raise RolloutError(
            f"{where} has {tokens} tokens after the prompt and weight_version={oldest}; versions must be runs of (version, tokens) of all of "
            f"them with that oldest version; got {runs}."
        )
