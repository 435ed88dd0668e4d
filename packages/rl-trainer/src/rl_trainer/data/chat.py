"""From a conversation to token ids, as the tokenizer of a Hugging Face folder wants it; needs `tokenizers` and `jinja2`, not transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rl_protocol import ConfigError, SchemaError
from rl_trainer.data.images import PLACEHOLDER, Vision
from rl_trainer.data.rendering import Renderer, RunawayTemplateError, check_syntax
from rl_trainer.data.rows import Message


class PromptEncoder:
    """Turns conversations into token ids.

    With a chat template, it says how roles are written and that the assistant is next. Without one, a conversation must be one message, whose
    text is the prompt as it is.

    Args:
        tokenizer: of the model.
        template: its chat template; empty: none.
        special_tokens: name -> text of those that the template may write.
        vision: how the model sees images; a text says why it sees none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        vision: Vision | str = "the model reads text alone",
    ) -> None:
        self.vision = vision
        self._tokenizer = tokenizer
        self._special = dict(special_tokens or {})
        self._template = _renderer(template, self._special) if template else None
        self.fingerprint = hashlib.sha256(
            json.dumps(
                [tokenizer.to_str(), template, sorted(self._special.items()), repr(vision) * isinstance(vision, Vision)]
            ).encode()
        ).hexdigest()
        """Changes with whatever changes token ids."""

    @classmethod
    def load(cls, folder: Path) -> PromptEncoder:
        """The tokenizer and chat template of a Hugging Face checkpoint folder.

        Raises:
            ConfigError: a file that is missing or can't be read.
        """
        try:
            tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
            config = _json(folder / "tokenizer_config.json")
            template = folder / "chat_template.jinja"
            text = template.read_text(encoding="utf-8") if template.exists() else _default(config.get("chat_template"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"The tokenizer in {folder} can't be read: {error}.") from error
        special = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name)
        }
        return cls(tokenizer, text, special, Vision.load(folder))

    def text(self, messages: Sequence[Message]) -> str:
        """A prompt without images as text.

        Raises:
            SchemaError: the template refuses it, or there is none for several messages.
            ConfigError: the template does not end, or takes more memory than it may.
        """
        (text,) = self.texts([(messages, False)])
        if isinstance(text, SchemaError):
            raise text
        return text

    def texts(self, prompts: Sequence[tuple[Sequence[Message], bool]]) -> list[str | SchemaError]:
        """Prompts as text, each with whether it has images: then PLACEHOLDER in it is what the template writes for one.

        What can't be rendered is an error in its place: the template refuses it, or there is none for several messages or images.

        Raises:
            ConfigError: the template does not end, or takes more memory than it may.
        """
        if self._template is None:
            return [_plain(messages, images=images) for messages, images in prompts]
        conversations = [
            [{"role": m.role, "content": _parts(m.content) if images else m.content} for m in messages]
            for messages, images in prompts
        ]
        try:
            rendered = self._template.render(conversations)
        except RunawayTemplateError as error:
            raise ConfigError(
                f"The chat template of the tokenizer can't be used: {error}. Repair chat_template in the folder of model.path."
            ) from error
        return [
            one if isinstance(one, str) else SchemaError(f"the chat template refuses the prompt: {one.reason}")
            for one in rendered
        ]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; a template writes the special tokens itself, otherwise the tokenizer adds its own."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._template is None)
        return [one.ids for one in encoded]


def _renderer(template: str, special: Mapping[str, str]) -> Renderer:
    try:
        check_syntax(template)
    except ValueError as error:
        raise ConfigError(f"The chat template of the tokenizer can't be read: {error}.") from error
    return Renderer(template, {"tools": None, "documents": None, "add_generation_prompt": True, **special})


def _plain(messages: Sequence[Message], *, images: bool) -> str | SchemaError:
    """The prompt of a tokenizer without template."""
    if len(messages) > 1:
        return SchemaError(
            f"the prompt has {len(messages)} messages, and the tokenizer no chat template that says how roles are written"
        )
    if images:
        return SchemaError("the prompt has images, and the tokenizer no chat template that says how they are written")
    return messages[0].content


def _parts(content: str) -> list[dict[str, str]]:
    """Text and images apart, as chat templates of models that see want them."""
    pieces = re.split(f"({PLACEHOLDER})", content)
    return [{"type": "image"} if p == PLACEHOLDER else {"type": "text", "text": p} for p in pieces if p]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _default(template: object) -> str:
    """A tokenizer has one template, or several by name."""
    if isinstance(template, list):
        named: dict[str, str] = {one["name"]: one["template"] for one in template}  # pyright: ignore[reportUnknownVariableType]
        return named.get("default", "")
    return template if isinstance(template, str) else ""


def _content(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])
