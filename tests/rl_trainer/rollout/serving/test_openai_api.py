"""Which part of a rendered conversation follows the turns of the assistant."""

from __future__ import annotations

import pytest

from rl_trainer.data.prompt_rows import Message
from rl_trainer.rollout.serving.openai_api import told_text


def talk(*turns):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [Message(names[role], content) for role, content in turns]


def rendered(messages):
    return "".join(f"<{one.role}>{one.content.strip()}</>" for one in messages) + "<assistant>"


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ([("u", "2+2?")], "2+2?</><assistant>"),
        ([("s", "add"), ("u", "2+2?")], "add</><user>2+2?</><assistant>"),
        ([("u", "2+2?"), ("a", "4")], ""),
        ([("u", "q"), ("a", "call"), ("t", " 7 \n"), ("u", "go on")], "7</><user>go on</><assistant>"),
        ([("u", "q"), ("a", "7"), ("t", "7")], "7</><assistant>"),
        ([("u", "q"), ("a", "call"), ("t", ""), ("u", "go on")], "go on</><assistant>"),
        ([("u", "q"), ("a", "x"), ("t", "7"), ("u", "7")], "7</><assistant>"),
        ([], ""),
    ],
)
def test_what_follows_the_last_turn_of_the_assistant(turns, told):
    messages = talk(*turns)
    assert told_text(messages, rendered(messages)) == told


def test_a_content_that_the_template_rewrites_is_not_found():
    assert told_text(talk(("u", "q"), ("a", "x"), ("t", "<7>")), "q x &lt;7&gt;") == ""
