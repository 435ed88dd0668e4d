"""PEFT folders that differ from the options, or that are not supported, are refused by field."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_protocol import ConfigError
from rl_trainer.config.adapter_folder import adapter_options, check_adapter, read_shapes
from rl_trainer.config.lora import LoraConfig

FIELDS = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
}
Q, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qv")


def zeros(modules=(Q, V)):
    tensors = {f"base_model.model.{name}.lora_A.weight": np.zeros((2, 8), np.float32) for name in modules}
    return tensors | {f"base_model.model.{name}.lora_B.weight": np.zeros((6, 2), np.float32) for name in modules}


def folder_of(path, fields=FIELDS, modules=(Q, V), more=()):
    path.mkdir(exist_ok=True)
    save_file(zeros(modules) | dict.fromkeys(more, np.zeros(6, np.float32)), path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def options(path, **changes):
    return LoraConfig(
        **{"rank": 2, "alpha": 4, "target_modules": ("q_proj", "v_proj"), "adapter_path": str(path)} | changes
    )


def test_an_adapter_that_the_options_would_make_is_accepted(tmp_path):
    folder = folder_of(tmp_path)
    check_adapter(options(folder), {Q: (6, 8), V: (6, 8), "model.layers.0.mlp.up_proj": (9, 8)})
    assert read_shapes(folder) == {name: {"lora_A": (2, 8), "lora_B": (6, 2)} for name in (Q, V)}
    only_q = folder_of(tmp_path / "q", modules=(Q,))
    check_adapter(options(only_q, target_modules=("q_proj",)), {Q: (6, 8), V: (6, 8)})


LAYERS = [f"model.layers.{number}.mlp.experts" for number in (0, 1)]
OF_EXPERTS = {
    **FIELDS,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
}
EACH = {f"{one}.{e}.{part}": (6, 8) for one in LAYERS for e in range(3) for part in ("gate_proj", "up_proj")}
EACH |= {f"{one}.{e}.down_proj": (8, 6) for one in LAYERS for e in range(3)}


def experts_of(path, fields=None, **sizes):
    """Save an adapter of q_proj and of three experts; `sizes` are other shapes of A and B."""
    shapes = {"q_proj": ((2, 8), (6, 2)), "gate_up": ((6, 8), (12, 6)), "down": ((6, 6), (8, 6))} | sizes
    modules = {Q: "q_proj", Q.replace("0", "1"): "q_proj"}
    modules |= {f"{one}.base_layer": "gate_up" for one in LAYERS} | dict.fromkeys(LAYERS, "down")
    path.mkdir(exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": np.zeros(shapes[kind][number], np.float32)
        for name, kind in modules.items()
        for number, side in enumerate("AB")
    }
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(OF_EXPERTS | (fields or {})))
    return path


def test_an_adapter_of_experts_is_compared_with_options_and_model(tmp_path):
    folder = experts_of(tmp_path)
    read = adapter_options(str(folder))
    assert read == {"rank": 2, "alpha": 4, "target_modules": ["down_proj", "gate_proj", "q_proj", "up_proj"]}
    lora = options(folder, target_modules=tuple(read["target_modules"]))
    dense = {Q: (6, 8), Q.replace("0", "1"): (6, 8)}
    joined = {
        f"{one}.{name}": shape
        for one in LAYERS
        for name, shape in (("gate_up_proj", (3, 12, 8)), ("down_proj", (3, 8, 6)))
    }
    for base in (None, dense | EACH, dense | joined):
        check_adapter(lora, base)
    for changed, message in (
        (options(folder, target_modules=("q_proj", "down_proj")), "must name gate_proj, up_proj, and"),
        (options(folder, target_modules=("q_proj", "up_proj", "down_proj")), "all of gate_proj, up_proj or none"),
        (options(folder, target_modules=lora.target_modules, exclude=("1.mlp.experts.down_proj",)), "exclude must not"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_adapter(changed, dense | EACH)
    four = EACH | {f"{one}.3.{part}": (6, 8) for one in LAYERS for part in ("gate_proj", "up_proj")}
    with pytest.raises(
        ConfigError, match=r"experts\.gate_up_proj must have lora_A, lora_B of rank 2 for each of 4 experts"
    ):
        check_adapter(lora, dense | four)
    other = {name: (7, 8) if name.endswith("up_proj") else shape for name, shape in (dense | EACH).items()}
    with pytest.raises(ConfigError, match=r"for a weight of \(12, 8\), and the base model's is \(14, 8\)"):
        check_adapter(lora, other)


def test_adapters_of_experts_that_do_not_fit_their_fields_are_refused(tmp_path):
    every = ("q_proj", "gate_proj", "up_proj", "down_proj")
    for name, fields, sizes, message in (
        ("a", {"target_parameters": ["mlp.experts.down_proj"]}, {}, r"names 1 parameters of this module"),
        ("b", {"target_parameters": None}, {}, r"names 0 parameters of this module; got None"),
        ("c", {"target_parameters": "down_proj"}, {}, r"target_parameters is 'down_proj'; supported are"),
        ("d", {}, {"down": ((6, 6), (8, 8))}, r"down_proj must have lora_A, lora_B of rank 2 for each of 3 experts"),
        ("e", {}, {"down": ((5, 6), (8, 5))}, r"down_proj must have lora_A, lora_B of rank 2 for each of 2 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_adapter(options(experts_of(tmp_path / name, fields, **sizes), target_modules=every))


def test_a_value_head_is_read_for_a_critic_alone(tmp_path):
    folder = folder_of(tmp_path, FIELDS | {"modules_to_save": ["classifier", "score"]})
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.score.weight": np.zeros((1, 8), np.float32)}, file)
    base = {Q: (6, 8), V: (6, 8)}
    check_adapter(options(folder), base | {"score": (1, 8)}, value_head=True)
    check_adapter(options(folder), value_head=True)
    with pytest.raises(ConfigError, match=r"score must have a weight of \(1, 7\)"):
        check_adapter(options(folder), base | {"score": (1, 7)}, value_head=True)
    with pytest.raises(ConfigError, match="modules_to_save is"):
        check_adapter(options(folder), base)
    save_file(tensors | {"base_model.model.score.bias": np.zeros(1, np.float32)}, file)
    with pytest.raises(ConfigError, match=r"score must have a weight of \(1, hidden size\)"):
        check_adapter(options(folder), value_head=True)


def test_options_that_are_read_from_an_adapter_are_those_it_was_made_with(tmp_path):
    folder = folder_of(tmp_path, FIELDS | {"use_rslora": True, "use_dora": None})
    read = adapter_options(str(folder))
    assert read == {"rank": 2, "alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    check_adapter(options(folder, **read | {"target_modules": tuple(read["target_modules"])}), {Q: (6, 8), V: (6, 8)})
    with pytest.raises(ConfigError, match=r"lora_bias is True"):
        adapter_options(str(folder_of(tmp_path, FIELDS | {"lora_bias": True})))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3'"),
        ({"r": 8}, r"LoraConfig\.rank must be 8, as r in"),
        ({"r": 0}, r"adapter_config\.json: r must be an integer of at least 1; got 0"),
        ({"r": "2"}, "r must be an integer of at least 1; got '2'"),
        ({"r": True}, "r must be an integer of at least 1; got True"),
        ({"lora_alpha": 0}, "lora_alpha must be a number above 0; got 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0; got None"),
        (
            {"target_modules": ["q_proj"]},
            f"has an adapter of {V}, which target_modules in adapter_config.json does not name",
        ),
        ({"target_modules": r".*\.q_proj"}, f"has an adapter of {V}, which target_modules"),
        ({"target_modules": "(q"}, "target_modules is '\\(q', which is no regular expression"),
        ({"lora_alpha": 16}, r"LoraConfig\.alpha must be 16, as lora_alpha in"),
        ({"use_rslora": True}, r"LoraConfig\.use_rslora must be True"),
        ({"use_dora": True}, r"LoraConfig\.use_dora must be True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["experts"]}, "target_parameters is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"a_field_of_a_later_peft": 2}, "a_field_of_a_later_peft is 2"),
    ],
)
def test_each_field_that_differs_or_is_not_supported_is_named(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        check_adapter(options(folder_of(tmp_path, FIELDS | fields)))


@pytest.mark.parametrize(
    ("changes", "base", "message"),
    [
        ({"target_modules": ("q_proj",)}, None, "target_modules must name v_proj"),
        ({"exclude": (V,)}, None, "exclude must not name it: the adapter"),
        ({"target_modules": ("q_proj", "v_proj", "o_proj")}, None, "names o_proj, for which"),
        ({}, {Q: (6, 8)}, f"has an adapter of {V}, which the base model does not have"),
        ({}, {Q: (6, 8), V: (5, 8)}, r"for a weight of \(6, 8\), and the base model's is \(5, 8\)"),
        (
            {},
            {Q: (6, 8), V: (6, 8), Q.replace("0", "1"): (6, 8), V.replace("0", "2"): (6, 8)},
            r"has no tensors .model\.layers\.1\.self_attn\.q_proj.*Leave out those that it does not have: LoraConfig\.exclude="
            r"\[model\.layers\.1\.self_attn\.q_proj,model\.layers\.2\.self_attn\.v_proj\]",
        ),
    ],
)
def test_modules_that_differ_are_named(tmp_path, changes, base, message):
    with pytest.raises(ConfigError, match=message):
        check_adapter(options(folder_of(tmp_path), **changes), base)


def test_folders_without_readable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone'.* must be a PEFT folder; it has no adapter_config\.json"):
        check_adapter(options(tmp_path / "gone"))
    folder = folder_of(tmp_path / "a", more=["base_model.model.lm_head.weight"])
    with pytest.raises(ConfigError, match=r"has the tensor base_model\.model\.lm_head\.weight"):
        check_adapter(options(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="is no readable safetensors file"):
        check_adapter(options(folder))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="is a pickle, which can run code"):
        check_adapter(options(folder))
    (folder / "adapter_config.json").write_text("[]")
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ConfigError, match="must hold a JSON object; got list"):
        check_adapter(options(folder))


@pytest.mark.parametrize("targets", [["q_proj", "0.self_attn.v_proj"], r".*\.[qv]_proj", "all-linear", None])
def test_each_form_of_target_modules_names_its_modules(tmp_path, targets):
    folder = folder_of(tmp_path, FIELDS | {"target_modules": targets})
    check_adapter(options(folder), {Q: (6, 8), V: (6, 8)})
    assert adapter_options(str(folder))["target_modules"] == ["q_proj", "v_proj"]


def test_files_that_no_engine_reads_are_refused(tmp_path):
    """peft and Megatron-Core fail with them, too, but only when the processes have started."""
    folder = folder_of(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for content, length in ((whole[:-8], len(whole) - 8), (whole + b"x", len(whole) + 1)):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"has {length} bytes, and its header describes {len(whole)}; copy it"):
            check_adapter(options(folder))
    save_file({name: tensor.astype(np.int8) for name, tensor in zeros().items()}, file)
    with pytest.raises(ConfigError, match=r"q_proj\.lora_A\.weight must be of type F32, F16, BF16; got I8"):
        check_adapter(options(folder))
    entry = f'{{"base_model.model.{Q}.lora_A.weight": {{"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 7]}},'
    for side, module, shape in (("B", Q, [6, 2]), ("A", V, [2, 8]), ("B", V, [6, 2])):
        name = f"base_model.model.{module}.lora_{side}.weight"
        entry += f'"{name}": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 7]}},'
    header = f"{entry[:-1]}}}".encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    with pytest.raises(ConfigError, match=r"of \[2, 8\] in F32 has 7 bytes; copy the file again"):
        check_adapter(options(folder))
    header = b'{"a": 3}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="is no readable safetensors file"):
        check_adapter(options(folder))
    file.rename(folder / "adapter_model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"is no readable safetensors file: .*No such file"):
        check_adapter(options(folder))
    (folder / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds tensors in several files .*; join them in one adapter_model"):
        check_adapter(options(folder))


def test_the_folders_inside_one_of_several_adapters_are_named(tmp_path):
    for name in ("two", "one"):
        folder_of(tmp_path / name)
    with pytest.raises(ConfigError, match="holds no adapter itself, but one, two inside; name the folder of one"):
        adapter_options(str(tmp_path))
    assert adapter_options(str(tmp_path / "one"))["rank"] == 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(tmp_path, dtype, value):
    import torch
    from safetensors.torch import save_file as save

    folder, largest = folder_of(tmp_path), torch.finfo(getattr(torch, dtype)).max
    tensors = {name: torch.full(one.shape, -largest).to(getattr(torch, dtype)) for name, one in zeros().items()}
    save(tensors, folder / "adapter_model.safetensors")
    check_adapter(options(folder))
    bad = f"base_model.model.{V}.lora_B.weight"
    tensors[bad][5, 1] = value
    save(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"{bad} has values that are NaN or infinite"):
        check_adapter(options(folder))
