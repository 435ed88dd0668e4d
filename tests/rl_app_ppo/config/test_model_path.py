"""`model.path` as a folder, a name in a simulated Hugging Face cache, and an adapter folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from relative import apart
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cli.main import main
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.model_path import find_model, given_model
from rl_app_ppo.merge_adapter import main as merge
from rl_app_ppo.merge_adapter import merge_adapter
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, OutputError

NAME, REVISION = "Qwen/Tiny-Instruct", "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache, with network access disabled."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    return folder


def checkpoint(folder, *files):
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).write_text("{}")
    return folder


def downloaded(cache, *files, name=NAME):
    """Write what `hf download` leaves: refs/main names the snapshot."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    return checkpoint(model / "snapshots" / REVISION, *files)


def test_a_folder_is_itself_and_none_is_the_demo_model(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "m", "config.json", "model.safetensors")
    assert find_model(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/m") == folder
    assert given_model(load_config([])) is None
    assert given_model(load_config([f"model.path={folder}"])) == folder


@pytest.mark.parametrize("name", [NAME, "gpt2"])
def test_a_name_of_the_hub_is_its_snapshot_in_the_local_cache(cache, name):
    snapshot = downloaded(cache, "config.json", "model.safetensors", "tokenizer.json", name=name)
    assert find_model(name) == snapshot


def test_a_folder_goes_before_a_model_of_the_same_name(cache, tmp_path, monkeypatch):
    downloaded(cache, "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / NAME, "config.json", "model.safetensors")
    assert find_model(NAME) == Path(NAME)


@pytest.mark.parametrize("files", [None, (), ("config.json",), ("model.safetensors",)])
def test_what_is_not_in_the_cache_as_a_whole_is_answered_with_the_command(cache, files):
    if files is not None:
        downloaded(cache, *files)
    with pytest.raises(ConfigError) as caught:
        find_model(NAME)
    message = str(caught.value)
    assert message.startswith(f"model.path={NAME!r} is no folder here")
    assert str(cache) in message
    assert f"run `uv run hf download {NAME}` first" in message


def test_the_whole_command_ends_with_exit_code_2_at_once(cache, tmp_path, capsys):
    assert main([f"model.path={NAME}", f"trainer.output_dir={tmp_path / 'outputs'}"]) == 2
    error = capsys.readouterr().err
    assert f"hf download {NAME}" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_what_is_neither_a_folder_nor_a_name_is_named(tmp_path):
    for name in ("/does/not/exist", "./gone", "a/b/c", "~/gone"):
        with pytest.raises(ConfigError, match=r"does not exist\. Give a folder written by save_pretrained"):
            find_model(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        find_model(str(tmp_path / "file"))


def test_a_checkpoint_that_lacks_files_is_named(tmp_path):
    folder = checkpoint(tmp_path / "m", "config.json", "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match=r"lacks 1 of the files .* such as model-00002-of-00002\.safetensors"):
        find_model(str(folder))
    for files in ((), ("weights.safetensors",), ("pytorch_model.bin",)):
        other = checkpoint(tmp_path / f"other-{len(files)}", "config.json", *files)
        with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
            find_model(str(other))


def test_an_index_that_can_not_be_read_is_refused_with_the_key(tmp_path):
    folder = checkpoint(tmp_path / "m", "config.json", "model.safetensors.index.json")
    with pytest.raises(ConfigError, match=r"model\.path='.*': .*index\.json can't be read: .*`weight_map`"):
        find_model(str(folder))


def test_prompts_with_tokens_that_the_model_does_not_have_are_refused(base, tmp_path):
    """The tokenizer has eight tokens, the model seven embedding rows: h, the last, has none."""
    folder = tmp_path / "small"
    shutil.copytree(base, folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(7)
    model.save_pretrained(folder)
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": text, "data_source": "d", "reward_model": {"ground_truth": "a"}} for text in ("a", "h")]

    def check(rows):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = [f"data.train_files={file}", f"data.val_files={file}", f"model.path={folder}"]
        preflight(
            Facts(load_config([*config, f"model.cache_dir={tmp_path}", "rollout.response_length=8"]), PluginPolicy())
        )

    check([rows[0]] * 2)
    with pytest.raises(
        ConfigError, match=r"the prompts hold token 7, and the model's vocab_size is 7: tokenizer and model"
    ):
        check(rows)


# -- adapters
@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    shape = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**shape, **heads, initializer_range=0.3)).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abcdefgh")}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="b").save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted


def test_an_adapter_is_answered_with_the_command_that_merges_it_which_does(base, adapter, tmp_path, capsys):
    folder, adapted = adapter
    out = tmp_path / "adapter-merged"
    command = f"uv run python -m rl_app_ppo.merge_adapter {folder} {out}"
    with pytest.raises(ConfigError) as caught:
        find_model(str(folder))
    assert f"adapter (PEFT) of the base model {str(base)!r}" in str(caught.value)
    assert f"`{command}`, then set model.path={out}." in str(caught.value)
    assert merge(command.split()[5:]) == 0
    assert capsys.readouterr().out == f"merged model: {out}\n"
    assert find_model(str(out)) == out
    merged, ids = AutoModelForCausalLM.from_pretrained(out), torch.arange(8)[None]
    with torch.no_grad():
        # compares with peft itself, before merging
        assert apart(merged(ids).logits, adapted(ids).logits) < 1e-5
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    assert (merged(ids).logits - plain).abs().max() > 0.01
    assert (out / "tokenizer.json").exists()


def test_a_model_beside_an_adapter_is_refused(base, adapter):
    """transformers would apply the adapter to the model; Megatron and vLLM would not."""
    folder, _ = adapter
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((base / file).read_bytes())
    with pytest.raises(ConfigError, match=r"holds a model and an adapter \(adapter_config\.json\)"):
        find_model(str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"field_of_a_later_peft": 3}, r"field_of_a_later_peft is 3.*Install the peft that wrote it \(\d"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type='PROMPT_TUNING' adds tokens"),
        ({"peft_type": "LATER"}, "can't be read as the settings of an adapter"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "can't be merged"),
    ],
)
def test_an_adapter_that_peft_would_merge_as_something_else_is_refused(base, adapter, tmp_path, settings, message):
    folder, _ = adapter
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match=message):
        merge_adapter(folder, tmp_path / "out", str(base))
    assert not (tmp_path / "out").exists()


def test_what_can_not_be_merged_is_named(base, adapter, tmp_path, cache, capsys):
    folder, _ = adapter
    with pytest.raises(OutputError, match="exists already"):
        merge_adapter(folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for named, words in ((NAME, f"hf download {NAME}"), ("", "names no base model; give it as the third argument")):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        assert merge([str(folder), str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    merge_adapter(folder, tmp_path / "out", str(base))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert merge([]) == 2
    assert merge([str(base), str(tmp_path / "out2"), str(base)]) == 2  # has no adapter
    assert "adapter_config.json" in capsys.readouterr().err
