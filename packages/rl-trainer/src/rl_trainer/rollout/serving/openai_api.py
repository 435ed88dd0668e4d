"""The part of OpenAI's API that the endpoint serves; unknown fields are refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rl_trainer.data.prompt_rows import Message


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str | tuple[TextPart, ...]

    @property
    def plain(self) -> Message:
        """With its pieces joined."""
        parts = self.content
        return Message(self.role, parts if isinstance(parts, str) else "".join(part.text for part in parts))


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of request."""

    model: str
    max_tokens: int | None = None
    """Most tokens of each choice; by default the run's limit, or what fits."""
    n: int = 1
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    include_stop_str_in_output: bool = False
    """vLLM's extension: keep the stop string in the text."""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    return_token_ids: bool = False
    """vLLM's extension: answer with `prompt_token_ids`, and `token_ids` of each choice."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Instead of the text."""
    user: str | None = None
    """Ignored, like the two below."""
    metadata: Any = None
    stream_options: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a choice."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST completions."""

    prompt: str | tuple[int, ...] = ""
    logprobs: int | None = None
    """0 or 1: log-probs of the sampled tokens."""


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST chat/completions."""

    messages: tuple[ChatMessage, ...] = ()
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, before it is formatted for either kind of request."""

    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None
    """The stop string that ended it."""
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """[R] each token as text; empty where log-probs were not asked for."""
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]


def told_text(messages: Sequence[Message], text: str) -> str:
    """The end of a conversation from the first message after the assistant's last turn.

    Args:
        messages: the conversation.
        text: the same, as the chat template has written it.

    Returns:
        Empty: there is no such message, or the template does not write it as it is. A content that
        is repeated in later messages counts from its last place.
    """
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    new = messages[turns[-1] + 1 if turns else 0 :]
    content = next((stripped for message in new if (stripped := message.content.strip())), "")
    place = text.rfind(content) if content else -1
    return text[place:] if place >= 0 else ""


def completion_body(
    request: CompletionRequest, choices: list[Choice], prompt: tuple[int, ...], name: str
) -> dict[str, Any]:
    """The answer to a CompletionRequest."""
    wanted = request.logprobs is not None
    listed = [
        {
            **_common(index, choice, request),
            "text": choice.text,
            "logprobs": {
                "tokens": choice.tokens,
                "token_logprobs": choice.log_probs,
                "top_logprobs": None,
                "text_offset": _offsets(choice.tokens),
            }
            if wanted
            else None,
        }
        for index, choice in enumerate(choices)
    ]
    if request.return_token_ids:
        listed = [{**one, "prompt_token_ids": prompt} for one in listed]  # where vLLM has them for completions
    return _body(request, "text_completion", listed, choices, prompt, name)


def chat_body(request: ChatRequest, choices: list[Choice], prompt: tuple[int, ...], name: str) -> dict[str, Any]:
    """The answer to a ChatRequest; as the only piece of a stream, with `delta` in place of
    `message`.
    """
    holder = "delta" if request.stream else "message"
    listed = [
        {
            **_common(index, choice, request),
            holder: {"role": "assistant", "content": choice.text},
            "logprobs": {
                "content": [
                    {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True)
                ]
            }
            if request.logprobs
            else None,
        }
        for index, choice in enumerate(choices)
    ]
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    body = _body(request, kind, listed, choices, prompt, name)
    return {**body, "prompt_token_ids": prompt} if request.return_token_ids else body


def _common(index: int, choice: Choice, request: _Request) -> dict[str, Any]:
    common: dict[str, Any] = {
        "index": index,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "weight_version": min(choice.versions),
    }
    if request.return_token_ids:
        common |= {"token_ids": choice.token_ids, "weight_versions": choice.versions}
    return common


def _body(
    request: _Request,
    kind: str,
    listed: list[dict[str, Any]],
    choices: list[Choice],
    prompt: tuple[int, ...],
    name: str,
) -> dict[str, Any]:
    made = sum(len(choice.token_ids) for choice in choices)
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "choices": listed,
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made},
    }


def _offsets(tokens: tuple[str, ...]) -> list[int]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return offsets[: len(tokens)]
