"""The agent loop (ReAct, arXiv:2210.03629): the policy writes, its calls are answered, and it goes on from there until it has said its last word.

Token ids go in and come out: see `Transcript`. An answer becomes token ids once, when it is appended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_protocol import ConfigError
from rl_trainer.agents.calls import Answer, Dialect
from rl_trainer.agents.tools import Tool, answer
from rl_trainer.agents.transcript import Transcript
from rl_trainer.course import Course
from rl_trainer.data import PromptRow
from rl_trainer.sessions import Generate, Trajectory

Finish = Literal["stop", "turns", "turn_length", "observation_length", "response_length", "abort"]
"""Why a session ended: with an answer; a call after its last turn; a turn that was too long; more told than may be; the whole too long; a turn
that was aborted again and again. A call in a turn that was cut off is not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a session may use. rollout.response_length is the limit of all of it, observations included.

    Sessions whose next turns have equal limits are generated together: with `turn_tokens` that is most of them, without it few.
    """

    turns: int = 8
    """Times the policy is asked."""
    turn_tokens: int = 0
    """Tokens of one turn; 0: what is left."""
    observation_tokens: int = 0
    """Tokens of all observations; 0: what is left."""
    answer_chars: int = 4096
    """Characters of one answer; the rest is cut off."""
    call_timeout_s: float = 10.0
    """Seconds of one call."""

    def __post_init__(self) -> None:
        least = {"turns": 1, "turn_tokens": 0, "observation_tokens": 0, "answer_chars": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"Limits.{name} must be at least {bound}; got {getattr(self, name)}.")
        if self.call_timeout_s <= 0:
            raise ConfigError(f"Limits.call_timeout_s must be greater than 0; got {self.call_timeout_s}.")


class ToolAgent:
    """A session in which the policy can call tools: `SessionKind(ToolAgent([..], Hermes()).run)`.

    Args:
        tools: what it can call; names must differ.
        dialect: how it writes calls and is answered.
        limits: what one session may use.

    Raises:
        ConfigError: two tools of one name.
    """

    def __init__(self, tools: Sequence[Tool], dialect: Dialect, limits: Limits | None = None) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ConfigError(f"Tools must have different names; got {[tool.name for tool in tools]}.")
        self._dialect = dialect
        self._limits = limits or Limits()

    async def run(self, row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
        """One session of one trajectory; see SessionKind.run."""
        limits, codec = self._limits, generate.codec
        transcript = Transcript(row.prompt_ids, generate)
        turns = told = 0
        answers: list[Answer] = []
        finish: Finish | None = None
        while finish is None:
            turn = await transcript.turn(limits.turn_tokens)
            turns += 1
            if turn.finish_reason != "stop":
                finish = _cut_off(turn.finish_reason, transcript.left)
                break
            calls = self._dialect.calls(codec.decode(turn.response_ids))
            if not calls or turns == limits.turns:
                finish = "turns" if calls else "stop"
                break
            now = await asyncio.gather(*(answer(call, self._tools, limits.call_timeout_s) for call in calls))
            answers += now
            ids = codec.encode(self._dialect.observation([self._shortened(one) for one in now]))
            told += len(ids)
            finish = self._no_room(told, transcript.left - len(ids))
            if finish is None:
                transcript.observe(ids)
        errors = sum(one.failed for one in answers)
        course = Course(turns=turns, tool_calls=len(answers), tool_errors=errors, finish=finish)
        return [transcript.trajectory(course)]

    def _shortened(self, one: Answer) -> Answer:
        most = self._limits.answer_chars
        return one if len(one.text) <= most else Answer(one.text[:most] + "...", failed=one.failed)

    def _no_room(self, told: int, left: int) -> Finish | None:
        """Why an observation can't be told after which so many tokens would have been `told`, and so many be `left`."""
        if self._limits.observation_tokens and told > self._limits.observation_tokens:
            return "observation_length"
        return "response_length" if left < 1 else None


def _cut_off(reason: Literal["length", "abort"], left: int) -> Finish:
    if reason == "abort":
        return "abort"
    return "turn_length" if left else "response_length"
