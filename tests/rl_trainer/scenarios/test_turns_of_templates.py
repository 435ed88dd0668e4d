"""What a dialect puts between two turns is what the chat templates of its models put there.

The templates are written after the published formats of the families, for these messages.
"""

from __future__ import annotations

import jinja2
import pytest

from rl_trainer.rollout.agents import DIALECTS, Answer

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.tool = false %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "{% if not ns.tool %}<｜Assistant｜>{% endif %}{% set ns.tool = false %}{{ m.content }}<｜end▁of▁sentence｜>{% else %}"
    "{% set ns.tool = true %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}<｜Assistant｜>{% endif %}"
)
KIMI = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}{% else %}"
    "<|im_system|>tool<|im_middle|>## Return of {{ m.id }}\n{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|assistant|>{{ m.content }}{% else %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant{{ m.content }}{{ '<|call|>' if m.id else '<|end|>' }}{% else %}"
    "<|start|>functions.{{ m.id }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FAMILIES = {
    "hermes": (CHATML, "<|im_end|>", "<|im_end|>", ""),
    "llama3_json": (LLAMA3, "<|eot_id|>", "<|eot_id|>", ""),
    "pythonic": (LLAMA3, "<|eot_id|>", "<|eot_id|>", ""),
    "deepseek_v3": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ""),
    "kimi_k2": (KIMI, "<|im_end|>", "<|im_end|>", "functions.now:0"),
    "glm45": (GLM, "<|observation|>", "<|user|>", ""),
    "openai": (GPT_OSS, "<|call|>", "<|end|>", "now"),
}
"""Dialect -> its template, ends of turns with a call and of others, the id of a call."""


def rendered(template, *messages):
    return (
        jinja2.Environment(autoescape=False).from_string(template).render(messages=messages, add_generation_prompt=True)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_context_of_the_next_turn_begins_with_all_before_it(name):
    """No token is encoded twice: the template repeats what the policy wrote, and adds the rest."""
    template, after_call, after_text, call_id = FAMILIES[name]
    question = {"role": "user", "content": "What time is it?"}
    call = {"role": "assistant", "content": "CALL", "id": call_id}
    answer = {"role": "tool", "content": "noon", "id": call_id}
    before = rendered(template, question) + "CALL" + after_call
    assert DIALECTS[name].end == after_call
    between = DIALECTS[name].observation([Answer("noon", call_id=call_id)])
    assert rendered(template, question, call, answer) == before + between
    said = {"role": "assistant", "content": "Noon."}
    assert rendered(template, question, call, answer, said, question) == (
        before + between + "Noon." + after_text + DIALECTS[name].message("What time is it?")
    )
