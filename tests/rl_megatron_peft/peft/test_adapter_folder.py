"""Adapter folders: round trips, the documented format, damaged files, contradictions."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from rl_megatron_peft import Adapter, AdapterError, LoraConfig, LoraPair, read_adapter, verify_adapter, write_adapter
from rl_protocol import OutputError, WeightTensor
from rl_protocol.batch.dtypes import storage_dtype

SIZES = {"q_proj": (6, 8), "v_proj": (6, 4), "down_proj": (10, 6)}
MODULE = "model.layers.0.self_attn.q_proj"


def tensor(dtype: str, *shape: int, seed: int = 0) -> WeightTensor:
    size = int(np.prod(shape)) * storage_dtype(dtype).itemsize
    return WeightTensor("any", dtype, shape, np.random.default_rng(seed).integers(0, 120, size, np.uint8))


def make(rank: int = 2, layers: int = 2, dtype: str = "bfloat16", **more: Any) -> Adapter:
    config = LoraConfig(rank=rank, alpha=4, target_modules=tuple(SIZES), **more)
    names = [f"model.layers.{i}.{'mlp' if n == 'down_proj' else 'self_attn'}.{n}" for i in range(layers) for n in SIZES]
    pairs = {
        name: LoraPair(
            a=tensor(dtype, rank, SIZES[name.rsplit(".", 1)[-1]][0], seed=i),
            b=tensor(dtype, SIZES[name.rsplit(".", 1)[-1]][1], rank, seed=i + 100),
            magnitude=tensor("float32", SIZES[name.rsplit(".", 1)[-1]][1], seed=i + 200) if config.use_dora else None,
        )
        for i, name in enumerate(names)
        if config.covers(name)
    }
    return Adapter(base_model="some/model", config=config, pairs=pairs)


def facts(adapter: Adapter) -> Any:
    def of(weight: WeightTensor) -> Any:
        return weight.dtype, weight.shape, weight.data.tobytes()

    pairs = {m: {side: of(tensor) for side, tensor in p.tensors().items()} for m, p in adapter.pairs.items()}
    return adapter.base_model, adapter.config, pairs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(tmp_path: Path, dtype: str):
    adapter = make(dtype=dtype, exclude=("model.layers.1.mlp.down_proj",), dropout=0.05)
    write_adapter(tmp_path / "deep" / "adapter", adapter)
    assert facts(read_adapter(tmp_path / "deep" / "adapter")) == facts(adapter)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["adapter"]


def test_dora_has_a_magnitude_of_each_row(tmp_path: Path):
    adapter = make(use_dora=True)
    write_adapter(tmp_path / "a", adapter)
    assert facts(read_adapter(tmp_path / "a")) == facts(adapter)
    written = safetensors.deserialize((tmp_path / "a" / "adapter_model.safetensors").read_bytes())
    vectors = {name: entry["shape"] for name, entry in written if name.endswith(".lora_magnitude_vector")}
    assert len(vectors) == len(adapter.pairs)
    assert vectors[f"base_model.model.{MODULE}.lora_magnitude_vector"] == [SIZES["q_proj"][1]]
    (tmp_path / "a" / "adapter_manifest.json").unlink()
    edit(tmp_path / "a", use_dora=False)
    with pytest.raises(AdapterError, match="is present, but use_dora is False"):
        read_adapter(tmp_path / "a")
    pair = adapter.pairs[MODULE]
    for wrong, message in (
        (tensor("float32", 5), r"has shape \(5,\), but lora_B has 8"),
        (tensor("int32", 8), "int32"),
    ):
        pairs = {**adapter.pairs, MODULE: dataclasses.replace(pair, magnitude=wrong)}
        with pytest.raises(AdapterError, match=message):
            verify_adapter(dataclasses.replace(adapter, pairs=pairs))


@given(st.integers(1, 9), st.integers(1, 3), st.floats(0.01, 1e6), st.sampled_from(["bfloat16", "float32"]))
def test_every_configuration_round_trips(tmp_path_factory: Any, rank: int, layers: int, alpha: float, dtype: str):
    adapter = make(rank, layers, dtype)
    adapter = dataclasses.replace(adapter, config=dataclasses.replace(adapter.config, alpha=alpha))
    path = tmp_path_factory.mktemp("a") / "adapter"
    write_adapter(path, adapter)
    assert facts(read_adapter(path)) == facts(adapter)


def test_the_folder_is_in_the_documented_format(tmp_path: Path):
    """As documented for safetensors and at huggingface.co/docs/peft/developer_guides/checkpoint."""
    adapter = make(rank=2, layers=1)
    write_adapter(tmp_path / "x", adapter)
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "exclude_modules": None,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    assert {key: config[key] for key in expected} == expected
    assert isinstance(config["lora_alpha"], int)
    raw = (tmp_path / "x" / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: entry["shape"] for name, entry in header.items()} == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": [2, 6],
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": [8, 2],
        "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight": [2, 6],
        "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight": [4, 2],
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": [2, 10],
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": [6, 2],
    }
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path):
    adapter = make(dtype="float32", layers=1)
    write_adapter(tmp_path / "x", adapter)
    file = tmp_path / "x" / "adapter_model.safetensors"
    got = dict(safetensors.deserialize(file.read_bytes()))
    entry = got[f"base_model.model.{MODULE}.lora_A.weight"]
    assert bytes(entry["data"]) == adapter.pairs[MODULE].a.data.tobytes()
    with safetensors.safe_open(file, framework="numpy") as opened:
        array = opened.get_tensor(f"base_model.model.{MODULE}.lora_B.weight")
    assert array.tobytes() == adapter.pairs[MODULE].b.data.tobytes()
    assert array.shape == (8, 2)


@pytest.mark.parametrize(
    "exclude",
    [("experts.gate_proj", "experts.up_proj", "mlp.experts.down_proj"), re.compile(r".*\.experts\..*")],
)
def test_experts_that_the_settings_leave_out_need_no_adapter(tmp_path: Path, exclude: Any):
    adapter = make(rank=2)
    attention = {name: pair for name, pair in adapter.pairs.items() if "mlp" not in name}
    config = dataclasses.replace(adapter.config, target_modules=(*SIZES, "gate_proj", "up_proj"), exclude=exclude)
    write_adapter(tmp_path / "a", dataclasses.replace(adapter, config=config, pairs=attention))
    assert read_adapter(tmp_path / "a").pairs.keys() == attention.keys()
    lost = dataclasses.replace(adapter, pairs=attention)  # experts are not left out
    with pytest.raises(AdapterError, match=r"mlp\.down_proj is a target and has no adapter"):
        verify_adapter(lost)
    half = {name: pair for name, pair in adapter.pairs.items() if name != "model.layers.1.mlp.down_proj"}
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.down_proj is a target and has no adapter"):
        verify_adapter(
            dataclasses.replace(adapter, config=dataclasses.replace(config, target_modules=tuple(SIZES)), pairs=half)
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid folder without a manifest, as PEFT writes it."""
    write_adapter(tmp_path / "x", make())
    (tmp_path / "x" / "adapter_manifest.json").unlink()
    return tmp_path / "x"


def test_a_folder_without_a_manifest_is_read(folder: Path):
    assert facts(read_adapter(folder)) == facts(make())


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"r": 4}, ".*lora_A", "but r is 4"),
        ({"r": ...}, "r", "is missing"),
        ({"r": "2"}, "r", "must be int; got '2'"),
        ({"r": 0}, "r", "rank must be an integer >= 1; got 0"),
        ({"lora_alpha": ...}, "lora_alpha", "is missing"),
        ({"lora_alpha": 10**400}, "lora_alpha", "too large"),
        ({"lora_alpha": 0}, "lora_alpha", "finite number above 0"),
        ({"lora_dropout": 2}, "lora_dropout", "below 1"),
        ({"peft_type": "IA3"}, "peft_type", "must be 'LORA'; got 'IA3'"),
        ({"peft_type": ...}, "peft_type", "got None"),
        ({"use_dora": True}, ".*lora_magnitude_vector", "is missing, but use_dora is True"),
        ({"use_dora": 1}, "use_dora", "must be true or false; got 1"),
        ({"use_rslora": 1}, "use_rslora", "must be true or false; got 1"),
        ({"bias": "all"}, "bias", "is 'all', which this reader does not support"),
        ({"rank_pattern": {"q_proj": 4}}, ".*q_proj.lora_A", "but r is 4"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "does not support"),
        ({"target_modules": "all-linear"}, ".*k_proj", "is a target and has no adapter"),
        ({"target_modules": 3}, "target_modules", "must be list or str; got 3"),
        ({"target_modules": ["q_proj", "v_proj"]}, ".*down_proj", "has an adapter, but target_modules is"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]},
            ".*up_proj",
            "is a target and has no adapter",
        ),
        ({"target_modules": ["q_porj"]}, "target_modules", "Did you mean 'q_proj'"),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, MODULE, "has an adapter, but"),
    ],
)
def test_contradictions_name_file_and_field(folder: Path, fields: dict[str, Any], field: str, message: str):
    edit(folder, **fields)
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(folder)
    assert caught.value.file.startswith(str(folder))
    assert re.fullmatch(field, caught.value.field)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the tensor file; keep the tensors."""
    file = folder / "adapter_model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update({new: header.pop(old)})


KEY = f"base_model.model.{MODULE}.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename(KEY, "lora.weight"), "lora.weight is not named like 'base_model.model.<module>.lora_A.weight'"),
        (rename(KEY, MODULE + ".lora_A.weight"), "is not named like"),
        (rename(KEY, "base_model.model.lm_head.lora_A.weight"), "is missing, but the module's other factor is present"),
        (lambda h: h[KEY].update(shape=[6, 2]), r"lora_A has shape \(6, 2\), but r is 2"),
        (lambda h: h[KEY].update(shape=[12]), "expected two non-empty dimensions"),
        (lambda h: h[KEY].update(dtype="F16"), "different types, float16 and bfloat16"),
        (lambda h: h[KEY].update(dtype="I16"), "is of type I16"),
        (lambda h: h[KEY].update(shape=[2, 7]), "is not a safetensors header"),
    ],
)
def test_bad_tensors_are_named(folder: Path, change: Callable[[dict[str, Any]], object], message: str):
    rewrite(folder, change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder)


def test_the_first_of_several_bad_tensors_is_named(folder: Path):
    """By name: the parser of safetensors returns them in an order that varies."""

    def change(header: dict[str, Any]) -> None:
        for i, old in enumerate([name for name in header if name != "__metadata__"]):
            header[f"bad{i:02}"] = header.pop(old)

    rewrite(folder, change)
    for _ in range(20):
        with pytest.raises(AdapterError, match="bad00 is not named like"):
            read_adapter(folder)


@given(st.booleans(), st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]), st.data())
def test_damaged_files_are_adapter_errors(tmp_path_factory: Any, manifest: bool, name: str, data: st.DataObject):
    """A manifest detects every change; without one, only those that break the file are detected."""
    path = tmp_path_factory.mktemp("a") / "x"
    write_adapter(path, make(layers=1))
    raw = (path / name).read_bytes()
    cut = data.draw(st.integers(0, len(raw) - 1))
    damaged = raw[:cut] + data.draw(st.binary(max_size=4)) + (raw[cut + 4 :] if data.draw(st.booleans()) else b"")
    (path / name).write_bytes(damaged)
    if not manifest:
        (path / "adapter_manifest.json").unlink()
    try:
        read_adapter(path)
    except AdapterError:
        return
    assert damaged == raw or not manifest


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_are_named(folder: Path, name: str):
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=rf"{name}: file can't be read: No such file"):
        read_adapter(folder)


def test_the_manifest_finds_a_flipped_bit(tmp_path: Path):
    write_adapter(tmp_path / "x", make())
    file = tmp_path / "x" / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors: file does not match adapter_manifest.json"):
        read_adapter(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2}', '{"version": 1}', '{"version": 1, "files": {}}'])
def test_a_bad_manifest_is_an_error(tmp_path: Path, text: str):
    write_adapter(tmp_path / "x", make())
    (tmp_path / "x" / "adapter_manifest.json").write_text(text)
    with pytest.raises(AdapterError, match="manifest"):
        read_adapter(tmp_path / "x")


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path):
    write_adapter(tmp_path / "x", make())
    with pytest.raises(OutputError, match="exists; only new folders are written"):
        write_adapter(tmp_path / "x", make())
    bad = dataclasses.replace(make(), pairs={})
    with pytest.raises(AdapterError, match="pairs is empty"):
        write_adapter(tmp_path / "y", bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be written"):
        write_adapter(tmp_path / "file" / "z", make())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "x"]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_megatron_peft.peft.adapter_folder.os.fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_adapter(tmp_path / "x", make())
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_in_memory_is_verified():
    good = make()
    verify_adapter(good)
    missing = dict(good.pairs)
    del missing["model.layers.1.self_attn.v_proj"]
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.self_attn\.v_proj is a target"):
        verify_adapter(dataclasses.replace(good, pairs=missing))
    with pytest.raises(AdapterError, match="not a LoRA target of a Hugging Face model"):
        verify_adapter(dataclasses.replace(good, pairs={**good.pairs, "lm_head": next(iter(good.pairs.values()))}))
    wrong = LoraPair(a=tensor("float32", 2, 6), b=tensor("float32", 8, 3))
    with pytest.raises(AdapterError, match=r"lora_B has shape \(8, 3\), but r is 2: dimension 1 must be 2"):
        verify_adapter(dataclasses.replace(good, pairs={**good.pairs, MODULE: wrong}))
    ints = LoraPair(a=tensor("int8", 2, 6), b=tensor("int8", 8, 2))
    with pytest.raises(AdapterError, match="is of type int8"):
        verify_adapter(dataclasses.replace(good, pairs={**good.pairs, MODULE: ints}))
