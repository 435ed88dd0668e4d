"""Rows of prompts in verl's format, a tokenizer of characters, and a chat template."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +=<>|"
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no tools here') }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
    {%- if loop.index > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def characters() -> Tokenizer:
    """A tokenizer with one token per character of ALPHABET."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*ALPHABET, "<unk>"])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return core


def row(text: str = "1+2=", **changes: Any) -> dict[str, Any]:
    """A row with that prompt; `changes` replace fields."""
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7, "split": "train"},
    } | changes
