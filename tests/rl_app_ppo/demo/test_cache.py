"""The cache of warmed-up models: used when complete, rebuilt when damaged, never incomplete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_app_ppo.demo import cache
from rl_app_ppo.demo.cache import entry_path
from rl_app_ppo.demo.settings import ModelSettings, WarmUpSettings
from rl_app_ppo.demo.warmup import cached_base_model, warm_up

TINY = WarmUpSettings(
    train_size=50,
    validation_size=20,
    max_steps=2,
    batch_size=8,
    model=ModelSettings(hidden_size=16, intermediate_size=32, layers=1, heads=2),
)


@dataclass
class Steps:
    seen: list[int] = field(default_factory=list)

    def __call__(self, step: int, total: int, loss: float, accuracy: float | None) -> None:
        self.seen.append(step)


def test_second_start_skips_the_warm_up(tmp_path: Path) -> None:
    first, second = Steps(), Steps()
    path = cached_base_model(tmp_path, TINY, first)
    assert cached_base_model(tmp_path, TINY, second) == path == entry_path(tmp_path, TINY)
    assert (first.seen, second.seen) == ([1, 2], [])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_entry_loads_as_it_was_trained(tmp_path: Path) -> None:
    path = cached_base_model(tmp_path, TINY)
    result = warm_up(TINY)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, weight in result.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert AutoTokenizer.from_pretrained(path).decode([3, 7]) == "37"
    assert cache.read_facts(path)["accuracy"] == result.accuracy


def test_another_process_may_replace_a_damaged_entry_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, rename = tmp_path / "base", Path.rename
    entry.mkdir()

    def after_the_other_process(source: Path, target: Path) -> Path:
        if source == entry:
            entry.rmdir()
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", after_the_other_process)
    cache.publish(entry, lambda folder: {"bytes": (folder / "a").write_bytes(b"a")})
    assert cache.is_whole(entry)


def flip_a_byte(path: Path) -> None:
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def cut_short(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def lose_a_file(path: Path) -> None:
    (path / "config.json").unlink()


def add_a_file(path: Path) -> None:
    (path / "extra.bin").write_bytes(b"x")


def lose_the_manifest(path: Path) -> None:
    (path / cache.MANIFEST).unlink()


def break_the_manifest(path: Path) -> None:
    (path / cache.MANIFEST).write_text("{", encoding="utf-8")


def change_the_format(path: Path) -> None:
    manifest = json.loads((path / cache.MANIFEST).read_text(encoding="utf-8"))
    (path / cache.MANIFEST).write_text(json.dumps(manifest | {"format": 99}), encoding="utf-8")


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, cut_short, lose_a_file, add_a_file, lose_the_manifest, break_the_manifest, change_the_format],
)
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = cached_base_model(tmp_path, TINY)
    damage(path)
    assert not cache.is_whole(path)
    steps = Steps()
    assert cached_base_model(tmp_path, TINY, steps) == path
    assert steps.seen == [1, 2]
    assert cache.is_whole(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> dict[str, object]:
        (folder / "half").write_text("x", encoding="utf-8")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.publish(tmp_path / "entry", fill)
    assert list(tmp_path.iterdir()) == []


def test_entry_of_another_process_stays(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def fill(text: str) -> Callable[[Path], dict[str, object]]:
        def write(folder: Path) -> dict[str, object]:
            (folder / "file").write_text(text, encoding="utf-8")
            return {}

        return write

    def slow(folder: Path) -> dict[str, object]:
        cache.publish(entry, fill("theirs"))
        return fill("ours")(folder)

    cache.publish(entry, slow)
    assert (entry / "file").read_text(encoding="utf-8") == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["entry"]


def test_file_in_the_place_of_an_entry_is_replaced(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.write_text("x", encoding="utf-8")
    cache.publish(entry, lambda folder: {"files": (folder / "file").write_text("y", encoding="utf-8")})
    assert cache.is_whole(entry)
