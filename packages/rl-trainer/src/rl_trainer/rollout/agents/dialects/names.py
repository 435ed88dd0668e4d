"""Dialects by name, and the one that a chat template tells."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest
from rl_trainer.rollout.agents.dialects.base import Dialect, Hermes
from rl_trainer.rollout.agents.dialects.deepseek import DeepSeekV3
from rl_trainer.rollout.agents.dialects.glm import GLM45
from rl_trainer.rollout.agents.dialects.gpt_oss import GptOss
from rl_trainer.rollout.agents.dialects.kimi import KimiK2
from rl_trainer.rollout.agents.dialects.llama import Llama3JSON, Pythonic
from rl_trainer.rollout.agents.dialects.mistral import Mistral
from rl_trainer.rollout.agents.dialects.qwen3_coder import Qwen3Coder

DIALECTS: Mapping[str, Dialect] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3JSON(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
    "glm45": GLM45(),
    "deepseek_v3": DeepSeekV3(),
    "kimi_k2": KimiK2(),
    "openai": GptOss(),
}

_MARKS: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(r"<tool_call>(?!.*(<function=|<arg_key>))", re.DOTALL),
    "qwen3_coder": re.compile(r"<function="),
    "llama3_json": re.compile(r"ipython.*[\"']parameters[\"']:", re.DOTALL),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "pythonic": re.compile(r"\[func_name1\("),
    "glm45": re.compile(r"<arg_key>"),
    "deepseek_v3": re.compile(r"<｜tool▁sep｜>.*```json", re.DOTALL),
    "kimi_k2": re.compile(r"<\|tool_call_argument_begin\|>"),
    "openai": re.compile(r"<\|channel\|>commentary"),
}
"""What the chat templates of a dialect's models tell or show the model."""


def dialect_of_template(template: str) -> str:
    """Name of the dialect in which a chat template writes calls.

    Raises:
        ConfigError: the template does not tell, tells several, or is empty.
    """
    found = [name for name, mark in _MARKS.items() if mark.search(template)]
    if len(found) == 1:
        return found[0]
    if not template:
        raise ConfigError(
            "RolloutConfig.session=tool_agent needs a model whose chat template describes tools in its prompts; "
            "this model has no chat template."
        )
    what = f"fits {' and '.join(found)}" if found else "tells none"
    raise ConfigError(
        f"AgentConfig.dialect must be one of {', '.join(DIALECTS)}; got auto, and the model's chat template {what}."
    )


def dialect_of(given: Dialect | str) -> Dialect:
    """The dialect itself, or the one of this name.

    Raises:
        ConfigError: there is no dialect of this name.
    """
    if not isinstance(given, str):
        return given
    if given not in DIALECTS:
        raise ConfigError(
            f"AgentConfig.dialect must be one of {', '.join(DIALECTS)}; got {given!r}.{nearest(given, DIALECTS)}"
        )
    return DIALECTS[given]
