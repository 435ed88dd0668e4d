"""Encodes conversations as token ids, with a Hugging Face tokenizer and chat template.

Needs `tokenizers` and `jinja2`, not transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from rl_protocol import ConfigError, SchemaError
from rl_protocol.counted import counted
from rl_trainer.data.images import PLACEHOLDER, Vision
from rl_trainer.data.prompt_rows import Message
from rl_trainer.data.template_subprocess import Renderer, RunawayTemplateError, template_names

_FIX = "Fix it there (chat_template.jinja, or chat_template in tokenizer_config.json), or set PromptEncoder.load to another folder."


class _Named(msgspec.Struct, frozen=True):
    """One of several templates in tokenizer_config.json."""

    name: str
    template: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt to write."""

    messages: Sequence[Message]
    images: bool = False
    """PLACEHOLDER in a message stands for an image, and becomes what the template writes for it."""
    tools: bool = True
    """Whether the encoder's tools are described in it."""


class PromptEncoder:
    """Encodes conversations as token ids.

    A chat template writes the roles and the start of the assistant's answer. Without one, a
    conversation must be a single message, whose text is the prompt.

    Args:
        tokenizer: of the model.
        template: its chat template; empty: none.
        special_tokens: name -> text of the special tokens that the template may use.
        vision: how the model sees images, or the reason why it can't.
        tools: descriptions of tools, in the form of OpenAI's functions, that the template writes
            into each prompt.
        folder: where the template is from, for messages.

    Raises:
        ConfigError: the template does not parse, or there are tools that it does not write.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        vision: Vision | str = "the model reads only text",
        tools: Sequence[Mapping[str, Any]] = (),
        folder: Path | None = None,
    ) -> None:
        self._named = f"The chat template in {folder}" if folder else "The chat template of the tokenizer"
        if tools and "tools" not in self._variables(template):
            raise ConfigError(
                f"The session has {counted(len(tools), 'tool')} to describe in each prompt, but the "
                f"{'chat template' if template else 'tokenizer'} "
                f"{'does not use tools' if template else 'has no chat template'}. Set PromptEncoder.load to a model whose template does, or "
                "register a session of your own, and describe its tools in the data."
            )
        self.vision = vision
        self._tokenizer = tokenizer
        self._special = dict(special_tokens or {})
        self._tools = list(tools) or None
        self._template = self._renderer(template) if template else None
        self.fingerprint = hashlib.sha256(
            json.dumps(
                [
                    *(tokenizer.to_str(), template, sorted(self._special.items())),
                    repr(vision) * isinstance(vision, Vision),
                    *tools,
                ]
            ).encode()
        ).hexdigest()
        """Hash of everything that token ids depend on."""

    @classmethod
    def load(cls, folder: Path, tools: Sequence[Mapping[str, Any]] = ()) -> PromptEncoder:
        """The tokenizer and chat template of a Hugging Face checkpoint folder.

        Raises:
            ConfigError: a file is missing or can't be read, or there are tools that the template
                does not write.
        """
        try:
            tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from error
        config, text = _tokenizer_config(folder), read_template(folder, with_tools=bool(tools))
        special = {
            name: _content(folder, name, config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name)
        }
        return cls(tokenizer, text, special, Vision.load(folder), tools, folder)

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a prompt without images.

        Raises:
            SchemaError: the template rejects it, or there are several messages and no template.
            ConfigError: the template exceeds its time or memory limit.
        """
        (text,) = self.texts([Conversation(messages)])
        if isinstance(text, SchemaError):
            raise text
        return text

    def texts(self, prompts: Sequence[Conversation]) -> list[str | SchemaError]:
        """The text of each prompt, or the error for a prompt that can't be rendered.

        Raises:
            ConfigError: the template exceeds its time or memory limit.
        """
        if self._template is None:
            return [_plain(one.messages, images=one.images) for one in prompts]
        conversations = [
            {
                "messages": [
                    {"role": m.role, "content": _parts(m.content) if one.images else m.content} for m in one.messages
                ],
                "tools": self._tools if one.tools else None,
            }
            for one in prompts
        ]
        try:
            rendered = self._template.render(conversations)
        except RunawayTemplateError as error:
            raise ConfigError(f"{self._named} can't be used: {str(error).rstrip('.')}. {_FIX}") from error
        return [
            one if isinstance(one, str) else SchemaError(f"the chat template rejects the prompt: {one.reason}")
            for one in rendered
        ]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts. Without a template, the tokenizer adds special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._template is None)
        return [one.ids for one in encoded]

    def _renderer(self, template: str) -> Renderer:
        self._variables(template)  # checks the syntax
        return Renderer(template, {"documents": None, "add_generation_prompt": True, **self._special})

    def _variables(self, template: str) -> frozenset[str]:
        """The names of variables in a template."""
        try:
            return template_names(template)
        except ValueError as error:
            raise ConfigError(f"{self._named} can't be read: {str(error).rstrip('.')}. {_FIX}") from error


def read_template(folder: Path, *, with_tools: bool) -> str:
    """The chat template of a Hugging Face checkpoint folder, for prompts with or without tools;
    empty: it has none.

    Raises:
        ConfigError: a file can't be read.
    """
    file = folder / "chat_template.jinja"
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    try:
        return _chosen(_tokenizer_config(folder).get("chat_template"), with_tools=with_tools)
    except msgspec.ValidationError as error:
        raise _unreadable(folder, error) from error


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        return _json(folder / "tokenizer_config.json")
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception | str) -> ConfigError:
    return ConfigError(
        f"The tokenizer in {folder} can't be read: {error}. Save the model's tokenizer there (tokenizer.save_pretrained), or set "
        "PromptEncoder.load to a folder that has one."
    )


def _plain(messages: Sequence[Message], *, images: bool) -> str | SchemaError:
    """The text of a prompt without a chat template."""
    if len(messages) > 1:
        return SchemaError(
            f"the prompt has {len(messages)} messages, but the tokenizer has no chat template that says how roles are written. Set "
            "tokenizer.chat_template and save the tokenizer in the folder of PromptEncoder.load, or write the prompt as one text"
        )
    if images:
        return SchemaError(
            "the prompt has images, but the tokenizer has no chat template that says how they are written"
        )
    return messages[0].content


def _parts(content: str) -> list[dict[str, str]]:
    """The content as text and image parts, as chat templates of vision models expect it."""
    pieces = re.split(f"({PLACEHOLDER})", content)
    return [{"type": "image"} if p == PLACEHOLDER else {"type": "text", "text": p} for p in pieces if p]


def _json(path: Path) -> dict[str, Any]:
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any]) if path.exists() else {}


def _chosen(template: object, *, with_tools: bool) -> str:
    """The template called default (with tools: tool_use) if the tokenizer has several, else its
    only one.
    """
    if isinstance(template, list):
        named = {one.name: one.template for one in msgspec.convert(template, list[_Named])}
        return named["tool_use"] if with_tools and "tool_use" in named else named.get("default", "")
    return template if isinstance(template, str) else ""


def _content(folder: Path, name: str, token: object) -> str:
    """The text of a special token, which the file has alone or as a field."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise _unreadable(folder, f"{name} of tokenizer_config.json must be text; got {token!r}")
    return text
