"""The dialect `openai`: calls of gpt-oss in the harmony format, in its channel `commentary`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed, arguments_of

_START = re.compile(r"(?:commentary|analysis|assistant)\s*to=functions\.")
_CALL = re.compile(
    r"(?P<name>[\w-]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?\s*(?P<arguments>\{.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class GptOss:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>`: one call,
    which ends the turn. Channels of thoughts may come before.

    The marks are special tokens, which decoding leaves out, so a call is also found without them.

    >>> GptOss().calls('analysisFirst.assistantcommentary to=functions.add json{"a": 1}')
    [Call(tool='add', arguments={'a': 1}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return "<|call|>"

    def calls(self, text: str) -> list[Call | Malformed]:
        starts = list(_START.finditer(text))
        if not starts:
            return []
        found = _CALL.match(text, starts[-1].end())
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
