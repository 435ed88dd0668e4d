"""Weights that do not belong to their config.json are refused without loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_app_ppo.inputs.weight_files import check_weights, weight_shapes
from rl_protocol import ConfigError

DESCRIBED = {"model_type": "qwen2", "num_hidden_layers": 2, "vocab_size": 5, "hidden_size": 4}
SHAPES = {
    "model.embed_tokens.weight": (5, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.1.mlp.up_proj.weight": (8, 4),
    "model.norm.weight": (4,),
}


def saved(folder: Path, shapes: dict[str, tuple[int, ...]], name: str = "model.safetensors") -> Path:
    save_file({one: np.zeros(shape, np.float32) for one, shape in shapes.items()}, folder / name)
    return folder


def header(folder: Path, value: object) -> Path:
    text = json.dumps(value).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def test_the_shapes_of_all_files_of_the_index_are_read_and_of_no_other_file(tmp_path: Path) -> None:
    names = list(SHAPES)
    for file, part in (("a.safetensors", names[:2]), ("b.safetensors", names[2:]), ("other.safetensors", ["x"])):
        saved(tmp_path, {name: SHAPES.get(name, (1,)) for name in part}, file)
    index = {"weight_map": {name: "a.safetensors" if name in names[:2] else "b.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: tuple(shape) for name, shape in weight_shapes(tmp_path).items()} == SHAPES


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "Expected `object`, got `array`"),
        ({"a": 3}, "Expected `object`, got `int`"),
        ({"a": {"shape": [1]}}, "`data_offsets`"),
    ],
)
def test_a_header_of_another_form_is_refused(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path=.*: model\.safetensors is no readable .*{words}"):
        weight_shapes(header(tmp_path, value))


def test_a_file_that_ends_before_its_header_does_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b'{"a"')
    with pytest.raises(ConfigError, match=r"model\.safetensors is no readable safetensors file: .*truncated"):
        weight_shapes(tmp_path)


def test_a_file_is_as_long_as_its_header_says(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": (3,)}) / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"has {size - 1} bytes, and its header says {size}"):
        weight_shapes(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, r"lack 2 of the 4 layers that config\.json names, such as layer 2\."),
        ({"vocab_size": 6}, r"embed_tokens\.weight has the shape \[5, 4\], and config\.json says \[6, 4\]"),
        ({"text_config": {"hidden_size": 8}}, r"has the shape \[5, 4\], and config\.json says \[5, 8\]"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = saved(tmp_path, SHAPES)
    check_weights(folder, DESCRIBED)
    with pytest.raises(ConfigError, match=words):
        check_weights(folder, DESCRIBED | changes)
    check_weights(folder, DESCRIBED | changes | {"model_type": "unknown"})


def test_weights_that_lack_a_layer_in_between_are_refused(tmp_path: Path) -> None:
    """Also in a checkpoint of the base model, whose names have no prefix."""
    shapes = {name.removeprefix("model."): shape for name, shape in SHAPES.items() if ".0." not in name}
    with pytest.raises(ConfigError, match=r"lack 1 of the 2 layers that config\.json names, such as layer 0\."):
        check_weights(saved(tmp_path, shapes), DESCRIBED)


def test_more_layers_than_config_json_names_are_allowed(tmp_path: Path) -> None:
    check_weights(saved(tmp_path, SHAPES), DESCRIBED | {"num_hidden_layers": 1})
