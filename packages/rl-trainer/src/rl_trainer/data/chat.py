"""From a conversation to token ids, as the tokenizer of a Hugging Face folder wants it; needs `tokenizers` and `jinja2`, not transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl_protocol import ConfigError, SchemaError
from rl_trainer.data.images import PLACEHOLDER, Vision
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
        self._template = _compile(template) if template else None
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

    def text(self, messages: Sequence[Message], *, images: bool = False) -> str:
        """The prompt as text; with `images`, PLACEHOLDER in it is what the template writes for one.

        Raises:
            SchemaError: the template refuses it, or there is none for several messages or images.
        """
        if self._template is None:
            if len(messages) > 1:
                raise SchemaError(
                    f"the prompt has {len(messages)} messages, and the tokenizer no chat template that says how roles are written"
                )
            if images:
                raise SchemaError(
                    "the prompt has images, and the tokenizer no chat template that says how they are written"
                )
            return messages[0].content
        turns = [{"role": m.role, "content": _parts(m.content) if images else m.content} for m in messages]
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except TemplateError as error:
            raise SchemaError(f"the chat template refuses the prompt: {error}") from error

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; a template writes the special tokens itself, otherwise the tokenizer adds its own."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._template is None)
        return [one.ids for one in encoded]


def _parts(content: str) -> list[dict[str, str]]:
    """Text and images apart, as chat templates of models that see want them."""
    pieces = re.split(f"({PLACEHOLDER})", content)
    return [{"type": "image"} if p == PLACEHOLDER else {"type": "text", "text": p} for p in pieces if p]


def _compile(template: str) -> Template:
    """As transformers compiles it: sandboxed, blocks trimmed."""
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ConfigError(f"The chat template of the tokenizer can't be read: {error}.") from error


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


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
