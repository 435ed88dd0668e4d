"""Chat templates that exceed a limit or fail raise an error that says so."""

from __future__ import annotations

import gc
import time
from contextlib import suppress

import psutil
import pytest
from tokenizers import Tokenizer, models

from rl_protocol import ConfigError, SchemaError
from rl_protocol.support.host.portable import uses_linux
from rl_trainer.data import template_subprocess
from rl_trainer.data.chat_template import Conversation, PromptEncoder
from rl_trainer.data.prompt_rows import Message

HELLO = [Message(role="user", content="hello")]


def encoder(template):
    return PromptEncoder(Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), template)


def children():
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if "template_subprocess.py" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture
def new_children():
    """A function that lists the processes which this test started.

    The process of an encoder that an earlier test left to the garbage collector may still run.
    """
    gc.collect()
    earlier = children()
    return lambda: [process for process in children() if process not in earlier]


linux_only = pytest.mark.skipif(not uses_linux(), reason="only Linux limits the address space")
TOO_LARGE = "took more than 512 MiB of memory"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
            "took more than 1 s",
        ),
        ("{% set n = 9 %}{{ n ** (n ** (n ** n)) }}", "took more than 1 s"),
        pytest.param("{% set n = 10 %}{{ 'x' * n ** 10 }}", TOO_LARGE, marks=linux_only),
        pytest.param("{{ messages[0]['content']|center(10 ** 10) }}", TOO_LARGE, marks=linux_only),
        pytest.param(
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            TOO_LARGE,
            marks=linux_only,
        ),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "wrote 99980001 characters for one prompt"),
        # jinja2 evaluates constants when it compiles
        pytest.param("{{ 'x' * 10 ** 10 }}", TOO_LARGE, marks=linux_only),
    ],
)
def test_a_template_without_end_is_stopped(monkeypatch, new_children, template, why):
    monkeypatch.setattr(template_subprocess, "RENDER_S", 1.0 if "1 s" in why else 60.0)
    hostile = encoder(template)
    with pytest.raises(
        ConfigError, match=rf"chat template of the tokenizer can't be used: .*{why}.*PromptEncoder\.load"
    ):
        hostile.text(HELLO)
    assert new_children() == []


def test_one_that_does_not_end_for_one_prompt_answers_the_others(monkeypatch):
    template = "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    mixed = encoder(template)
    assert mixed.text(HELLO) == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(template_subprocess, "RENDER_S", 1.0)
        with pytest.raises(ConfigError, match="more than 1 s"):
            mixed.texts([Conversation(HELLO), Conversation([Message(role="user", content="loop")])])
    assert mixed.text(HELLO) == "ok"


def test_errors_of_any_kind_are_those_of_the_prompt():
    for template, why in [
        ("{{ raise_exception('no system') }}", "rejects the prompt: no system"),
        ("{{ 1 + messages[0]['content'] }}", "rejects the prompt: TypeError"),
        ("{{ 1 // (messages|length - 1) }}", "rejects the prompt: ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "rejects the prompt: .*unsafe"),
    ]:
        with pytest.raises(SchemaError, match=why):
            encoder(template).text(HELLO)


def test_what_is_no_template_is_refused_when_it_is_read():
    for template in ("{% if %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(ConfigError, match="can't be read"):
            encoder(template)
    with pytest.raises(ConfigError, match=r"can't be compiled: .*No filter named 'nothing'"):
        encoder("{{ 1|nothing }}").text(HELLO)


def test_the_process_serves_many_batches_and_ends_with_the_encoder(new_children):
    many = encoder("<{{ messages[0]['content'] }}|{{ add_generation_prompt }}>")
    assert new_children() == []  # no process starts before it is needed
    rows = [Conversation([Message(role="user", content=str(n))]) for n in range(500)]
    for _ in range(3):
        assert many.texts(rows) == [f"<{n}|True>" for n in range(500)]
    (child,) = new_children()
    child.kill()
    child.wait(60)
    with pytest.raises(ConfigError, match="ended its process"):
        many.texts(rows)
    assert many.text(HELLO) == "<hello|True>"
    del many
    gc.collect()
    deadline = time.monotonic() + 60
    while new_children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
