"""The token ids of the demos' prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rl_app_ppo.demo.addition import Problem
from rl_protocol import SchemaError
from rl_trainer.data.chat_template import Conversation, PromptEncoder
from rl_trainer.data.prompt_rows import Message


def prompt_ids(encoder: PromptEncoder, problems: Sequence[Problem]) -> list[list[int]]:
    """The prompt of each problem, which is a message from the user.

    Raises:
        SchemaError: the chat template rejects one.
    """
    texts: list[str] = []
    for text in encoder.texts([Conversation([Message(role="user", content=problem.prompt)]) for problem in problems]):
        if isinstance(text, SchemaError):
            raise text
        texts.append(text)
    return encoder.ids(texts)
