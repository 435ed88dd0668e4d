"""Chat templates of model families, written after the published ones, with a tokenizer for each.

A template writes only text messages (`role`, `content`, and of tool messages `tool_call_id`). What
it does to earlier turns is what the family's does: it trims them, drops their thoughts or writes
other marks around them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% elif m.role == 'assistant' %}{% set thought = '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_CODER = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{% if m.content.startswith('[TOOL_CALLS]') %}{{ m.content }}{% else %}{{ ' ' + m.content | trim }}{% endif %}</s>"
    '{% else %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
    "{% endfor %}"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.tool = false %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "{% if not ns.tool %}<｜Assistant｜>{% endif %}{% set ns.tool = false %}CONTENT<｜end▁of▁sentence｜>{% else %}"
    "{% set ns.tool = true %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}<｜Assistant｜>OPENING{% endif %}"
)
DEEPSEEK_V3 = _DEEPSEEK.replace("CONTENT", "{{ m.content }}").replace("OPENING", "")
DEEPSEEK_R1 = _DEEPSEEK.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}").replace("OPENING", "<think>\n")
KIMI_K2 = (
    "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}{% else %}"
    "<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium<|end|>{% for m in messages %}{% if m.role == 'user' %}"
    "<|start|>user<|message|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}"
    "{% if 'to=functions' in m.content %}<|start|>assistant{{ m.content }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>functions.{{ m.tool_call_id }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{% set thought = '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.index0 > ns.last and thought %}{{ '\n' }}<think>{{ thought }}</think>{% else %}{{ '\n' }}<think></think>{% endif %}"
    "{% if content.strip() %}{{ '\n' }}{{ content.strip() }}{% endif %}"
    "{% else %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
OLMO2 = (
    "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% if not (m.role == 'assistant' and loop.last) %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GRANITE3 = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024.<|end_of_text|>\n{% for m in messages %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
SMOLLM3 = (
    "<|im_start|>system\n## Metadata\n\nReasoning Mode: /no_think<|im_end|>\n{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n{{ m.content.lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n{% endif %}"
)
_HERMES = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
_THOUGHT = "<think>\nIt is late.\n</think>\n\n"


@dataclass(frozen=True, kw_only=True)
class ChatFamily:
    """A family of models as its template and its tokens show it."""

    models: str
    template: str
    special: tuple[str, ...]
    """Tokens that decoding leaves out."""
    end: str
    """The token with which the policy ends a turn of text."""
    before: str = ""
    """What the policy writes before the text of a turn."""
    thought: str = _THOUGHT
    """The same, with a thought."""
    added: tuple[str, ...] = ("<think>", "</think>")
    """Tokens that decoding keeps."""
    dialect: str = ""
    """How it writes calls; empty: the template has no tools."""
    call: str = ""
    """A call of the tool `now`."""
    call_end: str = ""
    """The token that ends it; empty: `end`."""
    call_id: str = ""
    """What its answer repeats."""


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
CHAT_FAMILIES: Mapping[str, ChatFamily] = {
    "qwen2.5": ChatFamily(
        models="Qwen2.5", template=QWEN25, special=_CHATML, end="<|im_end|>", dialect="hermes", call=_HERMES
    ),
    "qwen3": ChatFamily(
        models="Qwen3", template=QWEN3, special=_CHATML, end="<|im_end|>", dialect="hermes", call=_HERMES
    ),
    "qwen3_coder": ChatFamily(
        models="Qwen3-Coder",
        template=QWEN3_CODER,
        special=_CHATML,
        end="<|im_end|>",
        dialect="qwen3_coder",
        call="<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "llama3": ChatFamily(
        models="Llama 3.1 to 3.3",
        template=LLAMA3,
        special=_LLAMA,
        end="<|eot_id|>",
        dialect="llama3_json",
        call='{"name": "now", "parameters": {}}',
    ),
    "llama3.2": ChatFamily(
        models="Llama 3.2 (1B, 3B)",
        template=LLAMA3,
        special=_LLAMA,
        end="<|eot_id|>",
        dialect="pythonic",
        call="[now()]",
    ),
    "mistral": ChatFamily(
        models="Mistral v0.3",
        template=MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        end="</s>",
        before=" ",
        thought=" " + _THOUGHT,
        dialect="mistral",
        call='[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        call_id="000000000",
    ),
    "deepseek_v3": ChatFamily(
        models="DeepSeek-V3",
        template=DEEPSEEK_V3,
        special=_DEEPSEEK_SPECIAL,
        end="<｜end▁of▁sentence｜>",
        dialect="deepseek_v3",
        call=_DEEPSEEK_CALL,
    ),
    "deepseek_r1": ChatFamily(
        models="DeepSeek-R1",
        template=DEEPSEEK_R1,
        special=_DEEPSEEK_SPECIAL,
        end="<｜end▁of▁sentence｜>",
        before="</think>\n\n",
        thought="It is late.\n</think>\n\n",
        dialect="deepseek_v3",
        call="</think>\n\n" + _DEEPSEEK_CALL,
    ),
    "kimi_k2": ChatFamily(
        models="Kimi K2",
        template=KIMI_K2,
        special=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
        end="<|im_end|>",
        dialect="kimi_k2",
        call=_KIMI_CALL,
        call_id="functions.now:0",
    ),
    "gpt_oss": ChatFamily(
        models="gpt-oss",
        template=GPT_OSS,
        special=(*("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),),
        end="<|return|>",
        before="<|channel|>final<|message|>",
        thought="<|channel|>analysis<|message|>It is late.<|end|><|start|>assistant<|channel|>final<|message|>",
        dialect="openai",
        call="<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        call_end="<|call|>",
        call_id="now",
    ),
    "glm4.5": ChatFamily(
        models="GLM-4.5",
        template=GLM45,
        special=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        end="<|user|>",
        before="\n<think></think>\n",
        thought="\n<think>It is late.</think>\n",
        dialect="glm45",
        call="\n<think></think>\n<tool_call>now\n</tool_call>",
        call_end="<|observation|>",
    ),
    "gemma": ChatFamily(
        models="Gemma 2 and 3",
        template=GEMMA,
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
    ),
    "phi4": ChatFamily(models="Phi-4", template=PHI4, special=(*_CHATML, "<|im_sep|>"), end="<|im_end|>"),
    "olmo2": ChatFamily(models="OLMo 2", template=OLMO2, special=("<|endoftext|>",), end="<|endoftext|>"),
    "granite3": ChatFamily(
        models="Granite 3",
        template=GRANITE3,
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        end="<|end_of_text|>",
    ),
    "smollm3": ChatFamily(models="SmolLM3, /no_think", template=SMOLLM3, special=_CHATML, end="<|im_end|>"),
}


def tokenizer_of(family: ChatFamily) -> Tokenizer:
    """A byte-level tokenizer that knows the family's special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["What time is it? Noon. It is late. assistant user"] * 4, trainer)
    made.add_special_tokens([AddedToken(token, special=True) for token in family.special])
    made.add_tokens([AddedToken(token, special=False) for token in family.added])
    return made


def write_folder(family: ChatFamily, folder: Path) -> Tokenizer:
    """Write tokenizer and template as a checkpoint folder has them; returns the tokenizer."""
    made = tokenizer_of(family)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": family.template}), encoding="utf-8")
    return made


def spelled(tokenizer: Tokenizer, family: ChatFamily, text: str) -> list[int]:
    """Ids of a text that the tokenizer itself would not give: a token for each byte and mark."""
    ids: list[int] = []
    marks = (*family.special, *family.added)
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), text[0])
        ids += [tokenizer.token_to_id(mark)] if mark in marks else tokenizer.encode(mark, add_special_tokens=False).ids
        text = text[len(mark) :]
    return ids
