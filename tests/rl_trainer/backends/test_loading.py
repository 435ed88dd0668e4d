"""Models loaded by the rows of each rank are those of transformers, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from rl_protocol import ConfigError
from rl_trainer.backends.loading import load_model, load_unread
from rl_trainer.backends.world import World

PROGRAM = Path(__file__).parents[1] / "programs" / "shard_loading.py"
SMALL = {
    "vocab_size": 15,  # two ranks have 8 and 7 rows
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def saved(folder, config, *, dtype=torch.float32, max_shard_size="5GB"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tied(folder):
    return saved(folder, Qwen2Config(**SMALL, tie_word_embeddings=True))


def many_files(folder):
    """In bfloat16 and several files."""
    config = Qwen2Config(**SMALL, tie_word_embeddings=False)
    saved(folder, config, dtype=torch.bfloat16, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def same(path, found):
    """Whether a model equals that of `load_model`: tensors, ties, configuration."""
    wanted = load_model(path)
    ours, theirs = (
        dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)])
        for m in (found, wanted)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].dtype == tensor.dtype, name
    assert len(list(found.parameters())) == len(list(wanted.parameters()))
    assert found.config.to_dict() == wanted.config.to_dict()
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert found.training == wanted.training is False
    return True


@pytest.mark.parametrize("made", [tied, many_files])
def test_a_model_is_made_of_zeros_and_then_read(tmp_path, made):
    path = made(tmp_path)
    model, unread = load_unread(path, packed=False)
    assert not any(weight.any() for weight in model.parameters())
    size = sum(weight.numel() * (4 if made is tied else 2) for weight in model.parameters())
    assert unread.read(World()) == size
    assert same(path, model)


@pytest.mark.parametrize("family", [LlamaConfig, Gemma3TextConfig])
def test_models_of_other_families_are_read_by_rows(tmp_path, family):
    path = saved(tmp_path, family(**SMALL))
    model, unread = load_unread(path, packed=True)
    unread.read(World())
    assert same(path, model)


def pickled(folder):
    path = tied(folder)
    weights = load_file(path / "model.safetensors")
    torch.save(weights, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def merged(folder):
    """transformers makes one weight of those of all experts."""
    saved(folder, MixtralConfig(**SMALL, num_local_experts=2))


def without_prefix(folder):
    """As GPT-2 was published."""
    path = saved(folder, GPT2Config(vocab_size=15, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    weights = load_file(path / "model.safetensors")
    short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file(short, path / "model.safetensors", metadata={"format": "pt"})


def both_of_a_tie(folder):
    """transformers unties them, since they differ."""
    path = tied(folder)
    weights = load_file(path / "model.safetensors")
    other = weights["model.embed_tokens.weight"] + 1
    save_file({**weights, "lm_head.weight": other}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("made", [pickled, merged, without_prefix, both_of_a_tie])
def test_a_folder_that_needs_more_than_reading_is_loaded_whole(tmp_path, caplog, made):
    made(tmp_path)
    model, unread = load_unread(tmp_path, packed=False)
    assert unread is None
    assert "Each rank reads all weights of" in caplog.text
    assert same(tmp_path, model)


def test_a_damaged_folder_is_named(tmp_path):
    path = many_files(tmp_path)
    model, unread = load_unread(path, packed=False)
    assert model is not None
    damaged = sorted(path.glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    for call in (lambda: unread.read(World()), lambda: load_unread(path, packed=False)):
        with pytest.raises(ConfigError, match=rf"{path}.* can't be loaded as a transformers"):
            call()
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        load_unread(path, packed=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found (see the program shard_loading.py), and the bytes of each folder."""
    out = tmp_path_factory.mktemp("ranks")
    large = Qwen2Config(**{**SMALL, "vocab_size": 20000, "hidden_size": 512}, tie_word_embeddings=True)
    made = {"tied": tied, "files": many_files, "large": lambda folder: saved(folder, large)}
    folders = [make(out / name) for name, make in made.items()]
    with (out / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(PROGRAM), str(out), *map(str, folders)], stdout=log, stderr=log)
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    assert code == 0, (out / "log").read_text()[-3000:]
    sizes = {
        path.name: sum(w.nbytes for file in path.glob("*.safetensors") for w in load_file(file).values())
        for path in folders
    }
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], sizes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "critic", "critic_lora"])
@pytest.mark.parametrize("folder", ["tied", "files"])
def test_each_of_two_ranks_reads_its_half(ranks, folder, kind):
    found, sizes = [rank[f"{folder}/{kind}"] for rank in ranks[0]], ranks[1]
    assert all(one["equal"] for one in found)
    (first,), (second,) = (one["read"] for one in found)
    assert second < first < 0.55 * sizes[folder]
    if kind in ("full", "lora"):
        assert first + second == sizes[folder]


@pytest.mark.slow
def test_adapters_that_begin_with_the_norms_of_weights_read_all(ranks):
    for folder in ("tied", "files"):
        assert [rank[f"{folder}/dora"] for rank in ranks[0]] == [{"equal": True, "read": [], "memory": []}] * 2


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(ranks):
    for rank in ranks[0]:
        assert max(rank["large/full"]["memory"]) < 0.75 * ranks[1]["large"]


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("load", [load_model, lambda path: load_unread(path, packed=False)], ids=["whole", "by rows"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), rf"it lacks {UP}, which would be random$"),
        (without("lm_head.weight"), r"it lacks lm_head\.weight, which would be random$"),
        (
            lambda tensors: {f"_orig_mod.{name}": value for name, value in tensors.items()},
            r"it lacks lm_head\.weight, model\.embed_tokens\.weight, .* and 24 more, which would be random; it has _orig_mod\.lm_head",
        ),
        (
            lambda tensors: {**without("lm_head.weight")(tensors), "score.weight": tensors["lm_head.weight"][:1]},
            r"it lacks lm_head\.weight, which would be random; it has score\.weight instead$",
        ),
        (
            lambda tensors: {**tensors, UP: tensors[UP][:40].clone()},
            rf"other shapes than its config\.json says: {UP} \[40, 32\], not \[48, 32\]$",
        ),
    ],
    ids=["layer", "head", "prefix", "classifier", "shape"],
)
def test_a_folder_that_lacks_weights_is_refused(tmp_path, load, change, message):
    path = saved(tmp_path, Qwen2Config(**SMALL, tie_word_embeddings=False))
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.mark.parametrize(("name", "value"), [("hidden_act", "float16"), ("dtype", "llama"), ("num_key_value_heads", 0)])
def test_a_wrong_field_of_the_configuration_is_named_with_its_folder(tmp_path, name, value):
    path = tied(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, name: value}))
    for call in (lambda: load_model(path), lambda: load_unread(path, packed=False)):
        with pytest.raises(
            ConfigError, match=rf"{path}.* can't be loaded as a transformers .* Look at its config\.json"
        ):
            call()


def test_an_older_transformers_is_named():
    program = (
        "import sys, rl_trainer.backends.loading; del sys.modules['rl_trainer.backends.loading']; "
        "sys.modules['transformers.conversion_mapping'] = None; "
        "import rl_trainer.backends.loading"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "ImportError: rl_trainer.backends needs transformers 5.6 or newer; transformers " in ended.stderr
