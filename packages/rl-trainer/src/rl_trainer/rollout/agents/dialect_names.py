"""Dialects by the names that vLLM gives its parsers of tool calls (`--tool-call-parser`)."""

from __future__ import annotations

from collections.abc import Mapping

from rl_protocol import ConfigError
from rl_trainer.rollout.agents.dialects import Dialect, Hermes
from rl_trainer.rollout.agents.llama import Llama3JSON, Pythonic
from rl_trainer.rollout.agents.mistral import Mistral
from rl_trainer.rollout.agents.qwen3_coder import Qwen3Coder

DIALECTS: Mapping[str, Dialect] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3JSON(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
}


def dialect_of(given: Dialect | str) -> Dialect:
    """The dialect itself, or the one of this name.

    Raises:
        ConfigError: there is no dialect of this name.
    """
    if not isinstance(given, str):
        return given
    if given not in DIALECTS:
        raise ConfigError(f"ToolAgent.dialect must be one of {', '.join(DIALECTS)}, or a Dialect; got {given!r}.")
    return DIALECTS[given]
