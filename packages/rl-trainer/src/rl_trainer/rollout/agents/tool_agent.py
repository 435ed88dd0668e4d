"""The agent loop (ReAct, arXiv:2210.03629): generate, answer the calls, repeat until there is no
call.

Token ids go in and come out; see `Transcript`. An answer is encoded once, when it is appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rl_trainer.config import Limits
from rl_trainer.data import PromptRow
from rl_trainer.rollout.agents.dialects.base import Answer, Dialect
from rl_trainer.rollout.agents.dialects.names import dialect_of
from rl_trainer.rollout.agents.environment import Environment, OpenEnvironment
from rl_trainer.rollout.agents.interactions import InteractionKind
from rl_trainer.rollout.agents.tools import ToolKind
from rl_trainer.rollout.agents.transcript import Transcript
from rl_trainer.rollout.session_turns import Generate, SessionKind, Trajectory
from rl_trainer.rollout.trajectory_stats import RolloutStats

Finish = Literal["stop", "turns", "turn_length", "observation_length", "response_length", "abort"]
"""Why a session ended: with an answer; a call or a reply due after the last turn; a turn that was
too long; too many observation tokens; a trajectory that was too long; a turn that was aborted too
often. A call in a turn that was cut off is not made.
"""


class ToolAgent:
    """A session in which the policy can call tools: `ToolAgent([..], "hermes").session`.

    Args:
        tools: the tools; names must differ.
        dialect: how calls and answers are written: a name in DIALECTS, or a dialect.
        limits: limits of one session.
        interactions: by name, what a row's `interaction_kwargs` may choose to reply to turns
            without a call.

    Raises:
        ConfigError: two tools have the same name, or there is no such dialect.
    """

    def __init__(
        self,
        tools: Sequence[ToolKind],
        dialect: Dialect | str,
        limits: Limits | None = None,
        interactions: Mapping[str, InteractionKind] | None = None,
    ) -> None:
        self._environment = Environment(tools, interactions or {})
        self._dialect = dialect_of(dialect)
        self._limits = limits or Limits()

    @property
    def session(self) -> SessionKind:
        """The session to register, whose tools the chat template describes in each prompt.

        `SessionKind(agent.run)` leaves that to the data.
        """
        return SessionKind(self.run, self._environment.described, self._environment.check)

    async def run(self, row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
        """Run one session, which has one trajectory; see SessionKind."""
        limits, transcript = self._limits, Transcript(row.prompt_ids, generate)
        turns = told = 0
        answers: list[Answer] = []
        finish: Finish | None = None
        async with self._environment.open(row, limits) as environment:
            while finish is None:
                turn = await transcript.turn(limits.turn_tokens)
                turns += 1
                if turn.finish_reason != "stop":
                    finish = _cut_off(turn.finish_reason, transcript.left)
                    break
                text = generate.tokenizer.decode(turn.response_ids)
                calls = self._dialect.calls(text)
                if turns == limits.turns:
                    finish = "turns" if calls or environment.interaction else "stop"
                    break
                now = await environment.answers(calls)
                answers += now
                said = self._observation(now) if now else await self._reply(environment, text)
                if said is None:
                    finish = "stop"
                    break
                if any(stop in text for stop in generate.stop):  # it has no end
                    said = (self._dialect.end if now else self._dialect.text_end) + said
                ids = generate.tokenizer.encode(_as_utf8(said))
                told += len(ids)
                finish = self._no_room(told, transcript.left - len(ids))
                if finish is None:
                    transcript.observe(ids)
        errors = sum(one.failed for one in answers)
        stats = RolloutStats(turns=turns, tool_calls=len(answers), tool_errors=errors, finish=finish)
        return [transcript.trajectory(stats)]

    def _observation(self, answers: Sequence[Answer]) -> str:
        return self._dialect.observation([self._shortened(one) for one in answers])

    async def _reply(self, environment: OpenEnvironment, text: str) -> str | None:
        """The next message of the user, with all text between the turns; None: there is none."""
        reply = await environment.reply(text)
        return None if reply is None else self._dialect.message(reply)

    def _shortened(self, one: Answer) -> Answer:
        most = self._limits.answer_chars
        return one if len(one.text) <= most else replace(one, text=one.text[:most] + "...")

    def _no_room(self, told: int, left: int) -> Finish | None:
        """Why an observation does not fit; None: it does."""
        if self._limits.observation_tokens and told > self._limits.observation_tokens:
            return "observation_length"
        return "response_length" if left < 1 else None


def _as_utf8(text: str) -> str:
    """The text with a ? for each lone surrogate, which a tool may have read from bytes that are no
    UTF-8, and no tokenizer takes.
    """
    return text.encode("utf-8", "replace").decode()


def _cut_off(reason: Literal["length", "abort"], left: int) -> Finish:
    if reason == "abort":
        return "abort"
    return "turn_length" if left else "response_length"
