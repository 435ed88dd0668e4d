"""The dialect `kimi_k2`: calls have an id, `functions.NAME:NUMBER`, which their answers repeat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed, arguments_of

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+):\d+")
_TURN = "<|im_assistant|>assistant<|im_middle|>"


@dataclass(frozen=True, slots=True)
class KimiK2:
    """Calls of Kimi K2, as its chat template writes them. Text may come before.

    >>> text = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    >>> KimiK2().calls(text)
    [Call(tool='now', arguments={}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return "<|im_end|>"

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        return [_call(part) for part in text.split(_BEGIN)[1:]]

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [
            f"<|im_system|>tool<|im_middle|>## Return of {one.call_id or 'an unreadable call'}\n{one.text}<|im_end|>"
            for one in answers
        ]
        return "".join(told) + _TURN

    def message(self, text: str) -> str:
        return f"<|im_user|>user<|im_middle|>{text}<|im_end|>{_TURN}"


def _call(part: str) -> Call | Malformed:
    body, end, _ = part.partition(_END)
    name, separator, arguments = body.partition(_ARGUMENTS)
    found = _ID.fullmatch(name.strip())
    if not end or not separator or found is None:
        return Malformed(f"a call is {_BEGIN}functions.NAME:NUMBER{_ARGUMENTS}{{..}}{_END}")
    call = arguments_of(found["name"], arguments)
    return call if isinstance(call, Malformed) else replace(call, id=name.strip())
