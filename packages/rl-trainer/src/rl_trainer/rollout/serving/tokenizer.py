"""Tokenizers with a chat template, for agents that send text. Loading a folder needs the extra
`data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_trainer.data.prompt_rows import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rl_trainer.data.chat_template import PromptEncoder


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """A conversation as text, ending with the beginning of the assistant's turn.

        Raises:
            SchemaError: the template rejects it.
        """
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, with the special tokens that a text begins with."""
        ...

    def encode_rest(self, text: str) -> Sequence[int]:
        """Ids of a continuation: no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Text of ids, with or without special tokens."""
        ...


class FolderChatTokenizer:
    """ChatTokenizer of a Hugging Face checkpoint folder."""

    def __init__(self, encoder: PromptEncoder, tokenizer: Tokenizer) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> FolderChatTokenizer:
        """Load the tokenizer and chat template of a folder.

        Raises:
            ConfigError: a file is missing or can't be read.
        """
        from tokenizers import Tokenizer  # optional: an endpoint for token ids needs none

        from rl_trainer.data.chat_template import PromptEncoder

        encoder = PromptEncoder.load(folder)  # raises ConfigError for an unreadable tokenizer.json
        return cls(encoder, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._encoder.text(messages)

    def encode(self, text: str) -> Sequence[int]:
        return self._encoder.ids([text])[0]

    def encode_rest(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
