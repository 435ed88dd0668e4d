"""What a checkpoint folder says about its model."""

from __future__ import annotations

import json

import pytest

from rl_protocol import ConfigError
from rl_rollout_vllm.weights.checkpoint import Vision, read_checkpoint, read_tensors, require_shards


def test_what_a_folder_says(checkpoint):
    found = read_checkpoint(checkpoint)
    assert (found.context, found.vocabulary, found.eos_ids, found.tied) == (64, 8, (1,), False)
    assert found.shapes == {"table.low": (4, 8), "table.high": (4, 8)}
    assert [w.name for w in read_tensors(checkpoint / "model.safetensors")] == ["table.low", "table.high"]


def test_generation_settings_come_before_the_models_and_several_stop_tokens_count(checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert read_checkpoint(tmp_path).eos_ids == (3, 5)


def vision_folder(checkpoint, tmp_path, **config):
    """A folder of a vision model with the weights of another one."""
    described = {
        "model_type": "qwen2_vl",
        "text_config": {"max_position_embeddings": 96, "vocab_size": 12, "hidden_size": 64, "num_attention_heads": 2},
        "vision_config": {"spatial_merge_size": 3},
        "image_token_id": 4,
        "video_token_id": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(described | config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    return tmp_path


def test_what_the_folder_of_a_vision_model_says(checkpoint, tmp_path):
    found = read_checkpoint(vision_folder(checkpoint, tmp_path))
    assert (found.context, found.vocabulary, found.head_size) == (96, 12, 32)
    assert found.vision == Vision(token=4, patches=9, never_generated=(4, 5))
    assert found.embedding == "model.language_model.embed_tokens.weight"
    with pytest.raises(ConfigError, match=r"2 attention heads and 2 .* 3 processes"):
        require_shards(json.loads((tmp_path / "config.json").read_text()), 3)


def test_weights_of_a_vision_model_have_one_name_in_files_of_any_age(checkpoint, tmp_path):
    found, text = read_checkpoint(vision_folder(checkpoint, tmp_path)), read_checkpoint(checkpoint)
    names = {
        "model.norm.weight": "model.language_model.norm.weight",
        "visual.merger.ln_q.weight": "model.visual.merger.ln_q.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: found.weight_name(name) for name in names} == names
    assert [found.weight_name(name) for name in names.values()] == list(names.values())
    assert [text.weight_name(name) for name in names] == list(names)


def test_a_vision_model_without_its_tokens_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json .* image_token_id, .* must be integers; got None, 5 and 3\."):
        read_checkpoint(vision_folder(checkpoint, tmp_path, image_token_id=None))


@pytest.mark.parametrize(
    ("heads", "shared", "size", "fits"),
    [(4, 4, 2, True), (4, 1, 2, True), (4, 2, 4, True), (4, 4, 3, False), (12, 4, 6, False), (12, 4, 12, True)],
)
def test_every_process_that_shares_a_layer_has_whole_heads(heads, shared, size, fits):
    described = {"num_attention_heads": heads, "num_key_value_heads": shared}
    if fits:
        require_shards(described, size)
    else:
        with pytest.raises(ConfigError, match=rf"{heads} attention heads and {shared} .* {size} processes"):
            require_shards(described, size)


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"hello"])
def test_a_damaged_file_is_named(checkpoint, tmp_path, content):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read as a safetensors file"):
        read_checkpoint(tmp_path)
