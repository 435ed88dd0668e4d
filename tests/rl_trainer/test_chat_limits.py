"""A chat template is a program that came with a model: whatever it does, it ends in an error that says so."""

from __future__ import annotations

import gc
import time

import psutil
import pytest
from tokenizers import Tokenizer, models

from rl_protocol import ConfigError, SchemaError
from rl_trainer.data import rendering
from rl_trainer.data.chat import PromptEncoder
from rl_trainer.data.rows import Message

HELLO = [Message(role="user", content="hello")]


def encoder(template):
    return PromptEncoder(Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), template)


def children():
    return [p for p in psutil.Process().children() if "rendering.py" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
            "took more than 1 s",
        ),
        ("{% set n = 9 %}{{ n ** (n ** (n ** n)) }}", "took more than 1 s"),
        ("{% set n = 10 %}{{ 'x' * n ** 10 }}", "took more than 512 MiB of memory"),
        ("{{ messages[0]['content']|center(10 ** 10) }}", "took more than 512 MiB of memory"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "took more than 512 MiB of memory",
        ),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "wrote 99980001 characters for one prompt"),
        ("{{ 'x' * 10 ** 10 }}", "took more than 512 MiB of memory"),  # jinja2 computes constants when it compiles
    ],
)
def test_a_template_without_end_is_stopped(monkeypatch, template, why):
    monkeypatch.setattr(rendering, "RENDER_S", 1.0 if "1 s" in why else 60.0)
    hostile = encoder(template)
    with pytest.raises(ConfigError, match=rf"chat template of the tokenizer can't be used: .*{why}.*model\.path"):
        hostile.text(HELLO)
    assert children() == []


def test_one_that_does_not_end_for_one_prompt_answers_the_others(monkeypatch):
    monkeypatch.setattr(rendering, "RENDER_S", 1.0)
    template = "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    mixed = encoder(template)
    assert mixed.text(HELLO) == "ok"
    with pytest.raises(ConfigError, match="more than 1 s"):
        mixed.texts([(HELLO, False), ([Message(role="user", content="loop")], False)])
    assert mixed.text(HELLO) == "ok"


def test_errors_of_any_kind_are_those_of_the_prompt():
    for template, why in [
        ("{{ raise_exception('no system') }}", "refuses the prompt: no system"),
        ("{{ 1 + messages[0]['content'] }}", "refuses the prompt: TypeError"),
        ("{{ 1 // (messages|length - 1) }}", "refuses the prompt: ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "refuses the prompt: .*unsafe"),
    ]:
        with pytest.raises(SchemaError, match=why):
            encoder(template).text(HELLO)


def test_what_is_no_template_is_refused_when_it_is_read():
    for template in ("{% if %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(ConfigError, match="can't be read"):
            encoder(template)
    with pytest.raises(ConfigError, match=r"can't be compiled: .*No filter named 'nothing'"):
        encoder("{{ 1|nothing }}").text(HELLO)


def test_the_process_serves_many_batches_and_ends_with_the_encoder():
    many = encoder("<{{ messages[0]['content'] }}|{{ add_generation_prompt }}>")
    assert children() == []  # none before it is needed
    rows = [([Message(role="user", content=str(n))], False) for n in range(500)]
    for _ in range(3):
        assert many.texts(rows) == [f"<{n}|True>" for n in range(500)]
    (child,) = children()
    child.kill()
    child.wait(30)
    with pytest.raises(ConfigError, match="ended its process"):
        many.texts(rows)
    assert many.text(HELLO) == "<hello|True>"
    del many
    gc.collect()
    deadline = time.monotonic() + 30
    while children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
