"""A model is a path, or an object that is written with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_app_ppo.api.model_argument import check_model, model_path
from rl_protocol import ConfigError


class Saved:
    """What transformers' models and tokenizers have in common."""

    def __init__(self, name: str, content: str) -> None:
        self.name, self.content = name, content

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / self.name).write_text(self.content)


MODEL, TOKENIZER = Saved("model.safetensors", "weights"), Saved("tokenizer.json", "words")


def test_a_path_stays_as_it_is(tmp_path: Path):
    check_model("Qwen/Qwen2.5-0.5B", None)
    assert model_path("Qwen/Qwen2.5-0.5B", None, tmp_path) == "Qwen/Qwen2.5-0.5B"
    assert model_path(tmp_path / "m", None, tmp_path) == str(tmp_path / "m")


def test_an_object_is_written_with_its_tokenizer(tmp_path: Path):
    check_model(MODEL, TOKENIZER)
    folder = Path(model_path(MODEL, TOKENIZER, tmp_path))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "model.safetensors": "weights",
        "tokenizer.json": "words",
    }
    assert model_path(MODEL, TOKENIZER, None) == "model"


def test_other_weights_have_another_folder(tmp_path: Path):
    one = model_path(MODEL, TOKENIZER, tmp_path)
    assert model_path(MODEL, TOKENIZER, tmp_path) == one
    assert model_path(Saved("model.safetensors", "other"), TOKENIZER, tmp_path) != one


@pytest.mark.parametrize(
    ("model", "tokenizer", "words"),
    [
        (3, None, r"model \(model\.path\) must be .*got int"),
        (None, TOKENIZER, r"model \(model\.path\) must be .*got NoneType"),
        (MODEL, None, r"tokenizer must be .*got NoneType"),
        (MODEL, "gpt2", r"tokenizer must be .*got str"),
        ("gpt2", TOKENIZER, "tokenizer has no effect with model='gpt2'"),
    ],
)
def test_a_wrong_model_is_refused(model, tokenizer, words):
    with pytest.raises(ConfigError, match=words):
        check_model(model, tokenizer)
