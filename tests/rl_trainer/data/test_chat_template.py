"""Chat templates render as in transformers and stay in their sandbox."""

from __future__ import annotations

import json
import re

import pytest
from prompt_rows import TEMPLATE, characters, row
from transformers import PreTrainedTokenizerFast

from rl_protocol import ConfigError, SchemaError
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.data.prompt_rows import parse_row
from rl_trainer.rollout.agents import Calculator, described

CONVERSATION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2="}]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_the_chat_template_gives_what_transformers_gives(tmp_path, where):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path, save_jinja_files=where == "chat_template.jinja")
    assert (tmp_path / "chat_template.jinja").exists() == (where == "chat_template.jinja")
    if where == "list":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = PromptEncoder.load(tmp_path)
    parsed = parse_row(row(prompt=CONVERSATION))
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert ours.text(parsed.prompt) == expected == "<|system|>be brief<<|user|>1+2=<<|assistant|>"
    assert ours.ids([expected]) == [
        tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    ]


WITH_TOOLS = "{% if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<{% endif %}" + TEMPLATE
TOOLS = described(Calculator()), {"type": "function", "function": {"name": "now", "parameters": {}}}


@pytest.mark.parametrize("several", [False, True])
def test_tools_are_described_as_transformers_has_them_described(tmp_path, several):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<", unk_token="<unk>")
    tokenizer.chat_template = WITH_TOOLS
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    if several:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": WITH_TOOLS},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, plain = PromptEncoder.load(tmp_path, TOOLS), PromptEncoder.load(tmp_path)
    prompt = parse_row(row(prompt=CONVERSATION)).prompt
    told = {"tokenize": False, "add_generation_prompt": True}
    assert ours.text(prompt) == tokenizer.apply_chat_template(CONVERSATION, tools=list(TOOLS), **told)
    assert '"name": "calculator"' in ours.text(prompt)
    assert plain.text(prompt) == tokenizer.apply_chat_template(CONVERSATION, **told)
    assert len({one.fingerprint for one in (ours, plain, PromptEncoder.load(tmp_path, TOOLS[:1]))}) == 3


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools | tojson(separators=(',', ':')) }}",  # Kimi K2
        "{{ tools | tojson(sort_keys=true, indent=2) }}",
        "{{ messages | tojson(true) }}",
        "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n{% endgeneration %}\n{% endfor %}\nend",
    ],
)
def test_what_transformers_adds_to_jinja_is_there(template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters())
    conversation = [{"role": "user", "content": "é < 2"}]
    expected = tokenizer.apply_chat_template(
        conversation, chat_template=template, tools=list(TOOLS), tokenize=False, add_generation_prompt=True
    )
    tools = TOOLS if "tools" in template else ()
    assert (
        PromptEncoder(characters(), template, tools=tools).text(parse_row(row(prompt=conversation)).prompt) == expected
    )


@pytest.mark.parametrize(
    ("template", "why"), [("", "tokenizer has no chat template"), (TEMPLATE, "does not use tools")]
)
def test_tools_that_no_template_describes_are_refused(template, why):
    with pytest.raises(ConfigError, match=f"The session has 2 tools to describe in each prompt, but the .*{why}"):
        PromptEncoder(characters(), template, tools=TOOLS)


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{% for %}", "{{ messages.append(1) }}"])
def test_a_chat_template_can_not_reach_out_of_its_sandbox(template):
    with pytest.raises((ConfigError, SchemaError), match="chat template"):
        PromptEncoder(characters(), template).text(parse_row(row()).prompt)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"The tokenizer in .* can't be read"):
        PromptEncoder.load(tmp_path)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}x", r"can't be read: .*needs to be closed is 'for'\."),
        ("{{ messages | nosuch }}", r"can't be used: .*No filter named 'nosuch'\."),
    ],
)
def test_a_broken_template_is_named_with_its_folder_and_what_to_fix(tmp_path, file, template, why):
    characters().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(template if file.endswith("jinja") else json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError) as caught:
        PromptEncoder.load(tmp_path).text(parse_row(row()).prompt)
    assert re.match(f"The chat template in {tmp_path} {why} Fix it there ", str(caught.value))
    assert "or set PromptEncoder.load to another folder" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    ["[]", "{", '{"chat_template": [{"name": "default"}]}', '{"eos_token": 1}', '{"pad_token": {"lstrip": false}}'],
)
def test_a_tokenizer_config_of_another_form_is_refused(tmp_path, config):
    characters().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"The tokenizer in .* can't be read: "):
        PromptEncoder.load(tmp_path)
