"""The dialect `openai`: calls of gpt-oss in the harmony format, in its channel `commentary`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed, arguments_of

_START = re.compile(r"(?:^|assistant|(?P<channel>commentary|analysis))\s*to=functions\.")
_ARGUMENTS = r"\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?\s*(?P<arguments>\{.*)"
_CALL = re.compile(r"(?P<name>[\w-]+)" + _ARGUMENTS, re.DOTALL)
_BEFORE_CHANNEL = re.compile(r"(?P<name>[\w-]+?)(?:<\|channel\|>)?commentary" + _ARGUMENTS, re.DOTALL)


@dataclass(frozen=True, slots=True)
class GptOss:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>`: one call,
    which ends the turn. Channels of thoughts may come before. `to=functions.NAME` may also stand
    before the channel, at the beginning of the turn: its `<|start|>assistant` is in the prompt.

    The marks are special tokens, which decoding leaves out, so a call is also found without them.

    >>> GptOss().calls('analysisFirst.assistantcommentary to=functions.add json{"a": 1}')
    [Call(tool='add', arguments={'a': 1}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return "<|call|>"

    @property
    def text_end(self) -> str:
        return "<|return|>"

    def calls(self, text: str) -> list[Call | Malformed]:
        starts = list(_START.finditer(text))
        if not starts:
            return []
        start = starts[-1]
        before_channel = None if start["channel"] else _BEFORE_CHANNEL.match(text, start.end())
        found = before_channel or _CALL.match(text, start.end())
        if found is None:
            return [Malformed("a call is commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>")]
        call = arguments_of(found["name"], found["arguments"].removesuffix("<|call|>"))
        return [call if isinstance(call, Malformed) else replace(call, id=call.tool)]

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [
            f"<|start|>functions.{one.call_id or 'unknown'} to=assistant<|channel|>commentary<|message|>{one.text}<|end|>"
            for one in answers
        ]
        return "".join(told) + "<|start|>assistant"

    def message(self, text: str) -> str:
        return f"<|start|>user<|message|>{text}<|end|><|start|>assistant"
