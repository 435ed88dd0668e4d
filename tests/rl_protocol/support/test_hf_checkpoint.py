"""The index of a checkpoint folder may name only files in that folder."""

from __future__ import annotations

import json

import pytest

from rl_protocol import ConfigError
from rl_protocol.support.hf_checkpoint import INDEX, safetensors_files, text_fields


def test_the_files_of_the_index_or_the_only_one(tmp_path):
    assert safetensors_files(tmp_path) == [tmp_path / "model.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"b": "2", "a": "1", "c": "2"}}))
    assert safetensors_files(tmp_path) == [tmp_path / "1", tmp_path / "2"]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "sub/file", "..", ".", ""])
def test_a_file_elsewhere_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors", "v": name}}))
    with pytest.raises(ConfigError, match=r"index\.json names .*weights must be files in"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}', "\udcff"])
def test_a_damaged_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"index\.json can't be read"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("text", [None, 1.5, "qwen2", []])
def test_a_text_part_of_another_type_has_no_fields(text):
    assert text_fields({"vocab_size": 8, "text_config": text})["vocab_size"] == 8
