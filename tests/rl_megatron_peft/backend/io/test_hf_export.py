"""Whole models and tokenizers as Hugging Face folders."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl_protocol import WeightTensor


def save_tokenizer(folder):
    """Save a tokenizer of three words with two chat templates."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, "no": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder, save_jinja_files=True)


def test_the_copy_of_a_tokenizer_has_its_chat_templates(tmp_path):
    from transformers import AutoTokenizer

    from rl_megatron_peft.backend.io.hf_export import copy_tokenizer

    base, copy = tmp_path / "base", tmp_path / "copy"
    save_tokenizer(base)
    (base / "old_tokens").mkdir()  # a folder is not copied
    (base / "model.safetensors").touch()
    copy.mkdir()
    written = copy_tokenizer(base, copy)
    assert {str(file.relative_to(copy)) for file in written} == {
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(copy.iterdir()) == {copy / file.relative_to(copy).parts[0] for file in written}
    found = AutoTokenizer.from_pretrained(copy)
    assert found.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert found.chat_template["tool_use"] == "{{ tools }}"


@pytest.mark.parametrize("named", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {}])
def test_the_configuration_names_the_element_type_of_the_weights(tmp_path, named):
    from rl_megatron_peft.backend.io.hf_export import write_model

    base, copy = tmp_path / "base", tmp_path / "copy"
    base.mkdir()
    copy.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", **named}))
    weight = WeightTensor("w", "float32", (2,), np.zeros(8, np.uint8))
    write_model(copy, base=base, weights=[weight], changes={"id2label": {}})
    written = json.loads((copy / "config.json").read_text())
    assert written == {"model_type": "llama", **dict.fromkeys(named or ["dtype"], "float32"), "id2label": {}}
