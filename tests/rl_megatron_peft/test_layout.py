"""Where tensors lie, and what folders hold: pure tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron_peft import AdapterError, FolderKind, Layout, ModelShape, folder_kind, whole_checkpoints
from rl_megatron_peft.folders import refuse_unless_resumable
from rl_megatron_peft.layout import held_tensors, keepers, renumbered
from rl_protocol import ConfigError

FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "rope_theta": 1e6,
}


def test_sizes_come_from_the_configuration():
    shape = ModelShape.of(FIELDS)
    assert (shape.rope_base, shape.qk_norm, shape.qkv_bias, shape.tied) == (1e6, True, False, False)
    assert shape.linear("q_proj") == (128, 64)
    assert shape.linear("v_proj") == (32, 64)
    assert shape.linear("o_proj") == (64, 128)
    assert ModelShape.of({**FIELDS, "head_dim": None}).head_dim == 8
    newer = {**FIELDS, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelShape.of(newer).rope_base == 7.0


def test_every_tensor_is_held_once_over_the_stages():
    for family in ("llama", "qwen2", "qwen3"):
        shape = ModelShape.of({**FIELDS, "model_type": family})
        parameters = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
        inside = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        inside += [f"self_attention.{name}.weight" for name in ("linear_qkv", "linear_proj")]
        inside += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        inside += ["self_attention.linear_qkv.bias"] if shape.qkv_bias else []
        inside += [f"self_attention.{x}_layernorm.weight" for x in "qk"] if shape.qk_norm else []
        parameters += [f"decoder.layers.{layer}.{name}" for layer in range(4) for name in inside]
        held = [tensor.name for parameter in parameters for tensor in held_tensors(parameter)]
        assert sorted(held) == sorted(shape.tensors())
        layout = Layout(pipeline=2)
        assert [layout.stage(f"model.layers.{i}.mlp.up_proj.weight", shape) for i in range(4)] == [0, 0, 1, 1]
        assert [layout.stage(name, shape) for name in ("model.embed_tokens.weight", "model.norm.weight")] == [0, 1]
    assert renumbered("embedding.word_embeddings.weight", 3) == "embedding.word_embeddings.weight"
    with pytest.raises(ConfigError, match="no LoRA target"):
        held_tensors("decoder.layers.0.mlp.router.weight")


def test_state_is_shared_by_size_and_nothing_is_divided():
    assert keepers([4, 1, 7, 2, 2], 2) == (1, 0, 0, 1, 1)  # 7 | 4; 7 | 4 + 2; 7 | 4 + 2 + 2; 7 + 1 | 8
    assert keepers([3, 3], 4) == (0, 1)
    assert keepers([], 2) == ()
    assert keepers([5, 6, 7], 1) == (0, 0, 0)


def test_layouts_that_do_not_divide_are_refused():
    shape = ModelShape.of(FIELDS)
    assert Layout(tensor=2).padded_vocab(shape) == 102
    with pytest.raises(ConfigError, match="groups=2 can't be shared by tensor=4 ranks"):
        Layout(tensor=4).check(shape)
    with pytest.raises(ConfigError, match="4 layers can't be shared by pipeline=3 stages"):
        Layout(pipeline=3).check(shape)
    with pytest.raises(ConfigError, match="tensor must be at least 1; got 0"):
        Layout(tensor=0)
    with pytest.raises(ConfigError, match=r"got tensor=1\. Set tensor to 2"):
        Layout(pipeline=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        ("adapter_config.json", FolderKind.PEFT, "holds no optimizer"),
        (
            "adapter_checkpoint/mp_rank_00_adapter.pt",
            FolderKind.LEGACY,
            "verl's old adapter_checkpoint format: its files hold no optimizer",
        ),
        ("mp_rank_00_001_adapter.pt", FolderKind.LEGACY, "rl-megatron-peft convert"),
        ("dist_ckpt/metadata.json", FolderKind.UNFINISHED, "writing it did not end"),
        ("readme", FolderKind.UNKNOWN, "expected manifest.json"),
    ],
)
def test_folders_are_told_apart_and_refused_by_name(tmp_path: Path, make: str, kind: FolderKind, message: str):
    (tmp_path / make).parent.mkdir(exist_ok=True)
    (tmp_path / make).write_text("{}")
    assert folder_kind(tmp_path) is kind
    with pytest.raises(AdapterError, match=message) as caught:
        refuse_unless_resumable(tmp_path)
    assert (caught.value.file, caught.value.field) == (str(tmp_path), "layout")


def test_whole_checkpoints_come_by_steps(tmp_path: Path):
    for name in ("step-10", "step-9", "step-11", ".step-12.partial", "other"):
        (tmp_path / name).mkdir()
        if name != "step-11":
            (tmp_path / name / "manifest.json").write_text('{"format": "rl-megatron-peft/1"}')
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-9", "step-10"]
    assert folder_kind(tmp_path / "nothing") is FolderKind.UNKNOWN
