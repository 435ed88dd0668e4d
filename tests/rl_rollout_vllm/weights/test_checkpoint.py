"""What a checkpoint folder says about its model."""

from __future__ import annotations

import json

import pytest

from rl_protocol import ConfigError
from rl_rollout_vllm.weights.checkpoint import read_checkpoint, read_tensors, require_shards


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
