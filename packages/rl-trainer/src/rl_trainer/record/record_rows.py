"""What a record contains: one struct per kind of line. `at` is Unix time in seconds."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    at: float
    """When it was written; the end of what took time."""


class StartRow(_Row, frozen=True, kw_only=True, tag="start"):
    """An attempt begins: everything of later steps that was written before is repeated."""

    after: int = 0
    """Step of the checkpoint it resumes from."""
    steps: int
    """Steps to train."""


class PhaseRow(_Row, frozen=True, kw_only=True, tag="phase"):
    """A phase of the start is over."""

    name: str
    began: float


class StepRow(_Row, frozen=True, kw_only=True, tag="step"):
    """A step is over; its metrics are in metrics.jsonl."""

    step: int


class AlarmRow(_Row, frozen=True, kw_only=True, tag="alarm"):
    """A warning about the run."""

    name: str
    text: str


class EndRow(_Row, frozen=True, kw_only=True, tag="end"):
    """The run is over."""

    outcome: str
    """finished, failed or interrupted."""
    text: str


class CallRow(_Row, frozen=True, kw_only=True, tag="call"):
    """A worker begins to answer a call; a SpanRow with the same `began` follows."""

    worker: str
    stage: str


class SpanRow(_Row, frozen=True, kw_only=True, tag="span"):
    """A worker has answered a call."""

    worker: str
    stage: str
    began: float


class SyncRow(_Row, frozen=True, kw_only=True, tag="sync"):
    """The replicas of the rollout have new weights."""

    began: float
    version: int
    num_bytes: int
    """Bytes that each of them received."""
    receivers: int


class RuleRow(_Row, frozen=True, kw_only=True, tag="rule"):
    """By which rule the trajectories after it are chosen."""

    text: str


class TokensRow(_Row, frozen=True, kw_only=True, tag="tokens"):
    """The texts of token ids, each once before the first trajectory that has it."""

    texts: dict[int, str]


class TrajectoryRow(_Row, frozen=True, kw_only=True, tag="trajectory"):
    """A sampled trajectory. The columns have one element per token of the response.

    Those that the run does not compute are empty. A number that is not finite is read as None.
    """

    step: int
    key: str
    """uid/session/index."""
    why: str
    """The rule by which its group was chosen: worst, best, random, stale, gap or failed."""
    data_source: str
    ground_truth: str
    prompt: str
    """Text with special tokens."""
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float | None]
    versions: list[tuple[int, int]]
    """Runs of [version of the weights, tokens that it generated]."""
    old_log_probs: list[float | None] = []
    ref_log_prob: list[float | None] = []
    entropy: list[float | None] = []
    advantages: list[float | None] = []
    finish: str = ""
    """Why it ended, for sessions that say so."""
    turns: int = 1
    tool_calls: int = 0
    reward: dict[str, float] = {}
    """Numbers that the reward function returned."""
    texts: dict[str, str] = {}
    """Texts that it returned."""
    failure: str = ""
    """How it failed; there is no score then."""


RecordRow: TypeAlias = (
    StartRow
    | PhaseRow
    | StepRow
    | AlarmRow
    | EndRow
    | CallRow
    | SpanRow
    | SyncRow
    | RuleRow
    | TokensRow
    | TrajectoryRow
)
