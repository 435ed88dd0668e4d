"""What a row of verl's data says to its agent, in `extra_info`.

    {"need_tools_kwargs": true,
     "tools_kwargs": {"search": {"create_kwargs": {"index": "wiki"}, "execute_kwargs": {"top": 3}}},
     "interaction_kwargs": {"name": "critic", "ground_truth": "72"}}

Values that are null, as parquet writes for other rows' keys, count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rl_protocol import ConfigError


class ToolKwargs(msgspec.Struct, frozen=True):
    """Arguments of one tool."""

    create_kwargs: dict[str, Any] | None = None
    """Of the tool itself, made for each session."""
    execute_kwargs: dict[str, Any] | None = None
    """Of each call, besides those that the policy gives."""
    calc_reward_kwargs: dict[str, Any] | None = None
    release_kwargs: dict[str, Any] | None = None

    def create(self) -> dict[str, Any]:
        return _given(self.create_kwargs)

    def execute(self) -> dict[str, Any]:
        return _given(self.execute_kwargs)


class RowSettings(msgspec.Struct, frozen=True):
    """The settings of one row's agent; other keys of `extra_info` are not read."""

    need_tools_kwargs: bool | None = None
    tools_kwargs: dict[str, ToolKwargs | None] | None = None
    interaction_kwargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, extra_info: Mapping[str, Any]) -> RowSettings:
        """The settings in these facts of a row.

        Raises:
            ConfigError: they have another form.
        """
        try:
            return msgspec.convert(extra_info, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"extra_info of a row: {error}") from error

    @property
    def tools(self) -> dict[str, ToolKwargs]:
        """Name of a tool -> its arguments."""
        return {name: given for name, given in (self.tools_kwargs or {}).items() if given is not None}

    @property
    def interaction(self) -> dict[str, Any]:
        """Arguments of the interaction and, as `name`, its name; empty: there is none."""
        return _given(self.interaction_kwargs)


def _given(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (kwargs or {}).items() if value is not None}
