"""What answers the policy in a session: tools, and who talks with it."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl_protocol import ConfigError
from rl_protocol.errors import located_error
from rl_trainer.config import Limits
from rl_trainer.data import PromptRow
from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed
from rl_trainer.rollout.agents.interactions import Interaction, InteractionKind, replied
from rl_trainer.rollout.agents.row_settings import RowSettings
from rl_trainer.rollout.agents.tools import Tool, ToolKind, answer, described


@dataclass(frozen=True, slots=True)
class OpenEnvironment:
    """The environment of one session."""

    tools: Mapping[str, Tool]
    execute_kwargs: Mapping[str, Mapping[str, Any]]
    """Name of a tool -> what the row gives to each call."""
    interaction: Interaction | None
    timeout_s: float
    """Longest duration of a call or a reply."""
    most_calls: int
    """Most calls of the session; 0: no limit."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def answers(self, calls: Sequence[Call | Malformed]) -> list[Answer]:
        """The answers to the calls of one turn, which are made at the same time.

        Those beyond `most_calls` of the session are not made, which their answers say.
        """
        allowed = [
            call if not self.most_calls or next(self._numbers) < self.most_calls else Malformed(self._no_more)
            for call in calls
        ]
        return await asyncio.gather(
            *(answer(call, self.tools, self.timeout_s, self.execute_kwargs) for call in allowed)
        )

    @property
    def _no_more(self) -> str:
        return f"no call is left: a session may make {self.most_calls}"

    async def reply(self, text: str) -> str | None:
        """The next message of the user, after a turn without calls; None: there is none.

        Raises:
            RolloutError: the interaction takes too long.
        """
        return None if self.interaction is None else await replied(self.interaction, text, self.timeout_s)


class Environment:
    """Makes the environment of each session.

    Args:
        tools: the tools; names must differ.
        interactions: by name, what a row's `interaction_kwargs` may choose.

    Raises:
        ConfigError: two tools have the same name, or one lacks what a tool has.
    """

    def __init__(self, tools: Sequence[ToolKind], interactions: Mapping[str, InteractionKind]) -> None:
        shown = [_shown(kind) for kind in tools]
        made = [tool for tool, _ in shown]
        self._kinds = {tool.name: kind for tool, kind in zip(made, tools, strict=True)}
        if len(self._kinds) < len(tools):
            raise ConfigError(
                f"Tools must have different names; got {', '.join(tool.name for tool in made)}. Leave one out of AgentConfig.tools, or choose "
                "among the tools of servers with MCPConfig.tools."
            )
        self._calls = {tool.name: tool.call for tool in made}
        self._interactions = dict(interactions)
        self.described = tuple(description for _, description in shown)
        """The tools as chat templates expect them."""

    @asynccontextmanager
    async def open(self, row: PromptRow, limits: Limits) -> AsyncGenerator[OpenEnvironment]:
        """The environment of a session of this row, which `check` has passed."""
        await asyncio.gather(*(kind.ready() for kind in self._kinds.values() if kind.ready is not None))
        given = RowSettings.read(row.extra_info)
        of_row, interaction = given.tools, given.interaction
        kind = self._interactions[interaction.pop("name")] if interaction else None
        yield OpenEnvironment(
            {name: kind.make(**of_row[name].create() if name in of_row else {}) for name, kind in self._kinds.items()},
            {name: one.execute() for name, one in of_row.items()},
            None if kind is None else kind.make(**interaction),
            limits.call_timeout_s,
            limits.calls,
        )

    def check(self, row: PromptRow) -> None:
        """Check what a row says to its agent.

        Raises:
            ConfigError: it names an unknown tool or interaction, or arguments that these do not
                take.
        """
        given = RowSettings.read(row.extra_info)
        if given.need_tools_kwargs and not given.tools:
            raise ConfigError("extra_info.need_tools_kwargs is true, and extra_info.tools_kwargs is empty.")
        for name, kwargs in given.tools.items():
            where = f"extra_info.tools_kwargs.{name}"
            if name not in self._kinds:
                raise ConfigError(f"{where} is of no tool in AgentConfig.tools; there are {', '.join(self._kinds)}.")
            if kwargs.calc_reward_kwargs or kwargs.release_kwargs:
                raise ConfigError(
                    f"{where} has calc_reward_kwargs or release_kwargs, but tools give no rewards; use a reward function."
                )
            _check_arguments(self._kinds[name].make, kwargs.create(), f"{where}.create_kwargs")
            _check_arguments(partial(self._calls[name], None), kwargs.execute(), f"{where}.execute_kwargs")
        if interaction := given.interaction:
            name = interaction.pop("name", None)
            if name not in self._interactions:
                known = ", ".join(self._interactions) or "none"
                raise ConfigError(
                    f"extra_info.interaction_kwargs.name must be in AgentConfig.interactions ({known}); got {name!r}."
                )
            _check_arguments(self._interactions[name].make, interaction, "extra_info.interaction_kwargs")


def _shown(kind: ToolKind) -> tuple[Tool, dict[str, Any]]:
    """A tool that is only described, and its description.

    Raises:
        ConfigError: it can't be made, or lacks what a tool has.
    """
    name = getattr(kind.make, "__qualname__", repr(kind.make))
    try:
        tool = kind.make()
        description, call = described(tool), tool.call
    except ConfigError:
        raise
    except Exception as error:  # boundary to user code, which may raise anything
        raise ConfigError(
            f"The tool {name} can't be described: {located_error(error)}. A tool of AgentConfig.tools is made without arguments, and has "
            "name, description, arguments and call."
        ) from error
    if inspect.iscoroutinefunction(call):
        raise ConfigError(
            f"The tool {name} has an async call, which nothing awaits. Write def call; each call has a thread of its own."
        )
    return tool, description


def _check_arguments(target: Callable[..., object], given: Mapping[str, Any], where: str) -> None:
    """Check that arguments fit a callable.

    Raises:
        ConfigError: they do not; `where` is their place in a row.
    """
    try:
        inspect.signature(target).bind(**given)
    except TypeError as error:
        raise ConfigError(f"{where} can't be used: {error}; got {given}.") from error
