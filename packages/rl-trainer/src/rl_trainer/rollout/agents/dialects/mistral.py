"""The dialect `mistral`: calls after `[TOOL_CALLS]`, as a JSON list or as `NAME{..}`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed, PlainJSON

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\{)")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Mistral:
    """`[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]`, or from version 11 of the tokenizer on
    `[TOOL_CALLS]NAME[ARGS]{..}` for each call. Text may come before.

    `[TOOL_CALLS]` and `[ARGS]` are special tokens, which decoding leaves out, so calls are also
    found without them, if they are the whole turn. The id of an answer is the place of its call.

    >>> Mistral().calls('[TOOL_CALLS]add[ARGS]{"a": 1}')
    [Call(tool='add', arguments={'a': 1}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return "</s>"

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        if _MARK not in text:
            return _named(text) if _NAMED.match(text) else PlainJSON().calls(text)
        found: list[Call | Malformed] = []
        for part in text.split(_MARK)[1:]:
            listed = part.strip().startswith(("[", "{"))
            calls = PlainJSON().calls(part) if listed else _named(part)
            found += calls or [Malformed(f"{_MARK} is not followed by a call")]
        return found

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [
            json.dumps({"content": answer.text, "call_id": f"{i:09}"}, ensure_ascii=False)
            for i, answer in enumerate(answers)
        ]
        return "".join(f"[TOOL_RESULTS] {one}[/TOOL_RESULTS]" for one in told)

    def message(self, text: str) -> str:
        return f"[INST] {text}[/INST]"


def _named(text: str) -> list[Call | Malformed]:
    """Calls of the form NAME{..}, one after the other."""
    found: list[Call | Malformed] = []
    place = 0
    while place < len(text.rstrip()):
        name = _NAMED.match(text, place)
        if name is None:
            return [*found, Malformed("a call is NAME{..}, and nothing follows the last one")]
        try:
            arguments, place = _DECODER.raw_decode(text, name.end())
        except (ValueError, RecursionError) as error:
            return [*found, Malformed(f"the arguments of {name[1]} are not JSON: {error}")]
        found.append(Call(name[1], arguments))
    return found
