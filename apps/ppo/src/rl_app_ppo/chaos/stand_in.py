"""A stand-in for the model: responses and updates are digests, so that a lost, doubled or changed
response changes all later weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rl_trainer import PromptOrder

PROMPTS = 100
"""Rows of the data set."""
_LONGEST = 64


class PlaneRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run with the stand-in."""

    folder: str
    """Absolute path."""
    max_staleness: int = 0
    steps: int = 6
    batch: int = 4
    """Prompts per step."""
    n: int = 2
    """Responses per prompt."""
    save_freq: int = 2
    rollouts: int = 2
    """Rollout processes."""

    @property
    def events_file(self) -> Path:
        """Where the processes write what they do."""
        return Path(self.folder, "events.jsonl")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return Path(self.folder, "checkpoints")

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return Path(self.folder, "journal")

    @property
    def events(self) -> int:
        """Events that a run without faults writes, but for those of its start and end."""
        return self.steps * (2 * self.batch + 3) + self.steps // self.save_freq


class ActorState(msgspec.Struct, kw_only=True):
    """What the trainer process knows, as a checkpoint has it."""

    weights: str = ""
    """Hexadecimal digest."""
    version: int = 0
    trained: list[list[tuple[int, int]]] = []
    """(row of the prompt, number of the response) of every step."""


def respond(weights: str, row: int, response: int) -> list[int]:
    """Tokens of a response: row of the prompt, number of the response, and some that depend on both
    and on the weights."""
    digest = hashlib.sha256(f"{weights}/{row}/{response}".encode()).digest()
    return [row, response, *digest[: 1 + digest[0] % 32], *range(digest[1] % (_LONGEST - 32))]


def update(state: ActorState, responses: Iterable[Sequence[int]]) -> ActorState:
    """The state after a step with these responses, in any order."""
    ordered = sorted([*map(int, response)] for response in responses)
    digest = hashlib.sha256(state.weights.encode() + msgspec.json.encode(ordered))
    trained = [(row, response) for row, response, *_ in ordered]
    return ActorState(weights=digest.hexdigest(), version=state.version + 1, trained=[*state.trained, trained])


def expected(run: PlaneRun) -> ActorState:
    """The state after a run without faults, computed without processes.

    Step t is generated with the weights of step t - 1 - max_staleness.
    """
    order, states = PromptOrder(PROMPTS, run.batch, 0), [ActorState()]
    for step in range(run.steps):
        weights = states[max(0, step - run.max_staleness)].weights
        rows = order.take(step * run.batch, run.batch)
        states.append(update(states[-1], [respond(weights, row, i) for row in rows for i in range(run.n)]))
    return states[-1]
