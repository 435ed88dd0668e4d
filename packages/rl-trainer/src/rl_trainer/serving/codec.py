"""Words to token ids and back, for agents that speak words; needs `tokenizers` and `jinja2` (the extra `data`) when a folder is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_trainer.data.rows import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rl_trainer.data.chat import PromptEncoder


class TextCodec(Protocol):
    """A tokenizer with its chat template."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """A conversation as text, with what says that the assistant is next.

        Raises:
            SchemaError: the template refuses it.
        """
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text from its beginning."""
        ...

    def encode_rest(self, text: str) -> Sequence[int]:
        """Ids of a text that goes on from another: nothing is put before it."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Text of ids, with or without special tokens."""
        ...


class ChatCodec:
    """TextCodec of a Hugging Face checkpoint folder."""

    def __init__(self, encoder: PromptEncoder, tokenizer: Tokenizer) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> ChatCodec:
        """Of a folder.

        Raises:
            ConfigError: a file that is missing or can't be read.
        """
        from tokenizers import Tokenizer  # an endpoint for token ids does without

        from rl_trainer.data.chat import PromptEncoder

        encoder = PromptEncoder.load(folder)  # says what is wrong with the same file
        return cls(encoder, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, messages: Sequence[Message]) -> str:
        """See TextCodec.prompt."""
        return self._encoder.text(messages)

    def encode(self, text: str) -> Sequence[int]:
        """See TextCodec.encode."""
        return self._encoder.ids([text])[0]

    def encode_rest(self, text: str) -> Sequence[int]:
        """See TextCodec.encode_rest."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """See TextCodec.decode."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
