"""The dialect `deepseek_v3`: calls between special marks, with arguments as a JSON code block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed, arguments_of

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_BODY = re.compile(r"\s*\w*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeepSeekV3:
    """Calls of DeepSeek-V3 and R1, as their chat template writes them. Text may come before.

    The template puts no mark of a new turn after answers: the policy continues its own.

    >>> block = "function<｜tool▁sep｜>now\\\\n```json\\\\n{}\\\\n```".replace("\\\\n", chr(10))
    >>> DeepSeekV3().calls(f"<｜tool▁call▁begin｜>{block}<｜tool▁call▁end｜>")
    [Call(tool='now', arguments={}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return "<｜end▁of▁sentence｜>"

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        return [_call(part) for part in text.split(_BEGIN)[1:]]

    def observation(self, answers: Sequence[Answer]) -> str:
        told = "\n".join(f"<｜tool▁output▁begin｜>{one.text}<｜tool▁output▁end｜>" for one in answers)
        return f"<｜tool▁outputs▁begin｜>{told}<｜tool▁outputs▁end｜>"

    def message(self, text: str) -> str:
        return f"<｜User｜>{text}<｜Assistant｜>"


def _call(part: str) -> Call | Malformed:
    body, end, _ = part.partition(_END)
    found = _BODY.fullmatch(body)
    if not end or found is None:
        return Malformed(f"a call is {_BEGIN}function{_SEPARATOR}NAME, a line break, a JSON code block and {_END}")
    return arguments_of(found["name"].strip(), found["arguments"])
