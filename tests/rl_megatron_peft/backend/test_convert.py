"""`rl-megatron-peft convert` between this package's formats and verl's old one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from verl_adapters import RANK, legacy_files, trained

from rl_megatron_peft import AdapterError, FolderKind, LoraConfig, ModelShape, fingerprint, folder_kind, read_adapter
from rl_megatron_peft.cli import main
from rl_protocol import ConfigError, OutputError


@pytest.fixture(scope="module")
def convert():

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rl_megatron_peft.backend.convert import convert

    return convert


def assert_is(folder, shape, base):
    """Check that the folder holds exactly the adapter of `trained`."""
    adapter, pairs = read_adapter(folder), trained(shape)
    assert adapter.pairs.keys() == pairs.keys()
    for name, (a, b) in pairs.items():
        assert adapter.pairs[name].a.data.tobytes() == a.tobytes(), name
        assert adapter.pairs[name].b.data.tobytes() == b.tobytes(), name
    assert (adapter.config.rank, adapter.config.alpha) == (RANK, 6.0)
    assert adapter.fingerprint == fingerprint(base)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"), [("llama", 1, 1), ("qwen2", 2, 1), ("qwen3", 1, 2), ("qwen3", 2, 2)]
)
def test_verls_old_format_becomes_a_peft_folder(convert, models, tmp_path, family, tensor, pipeline):
    base, shape = models / family, ModelShape.read(models / family)
    source = legacy_files(tmp_path / "old", shape, tensor=tensor, pipeline=pipeline)
    assert convert(source, tmp_path / "new", to="peft", base=base, alpha=6.0) is FolderKind.LEGACY
    assert_is(tmp_path / "new", shape, base)


@pytest.mark.parametrize("fused", [True, False])
def test_to_a_checkpoint_to_resume_from_and_back(convert, models, tmp_path, fused):
    base, shape = models / "qwen2", ModelShape.read(models / "qwen2")
    source = legacy_files(tmp_path / "old", shape, tensor=2, pipeline=1)
    convert(source, tmp_path / "resume", to="resume", base=base, alpha=6.0, fused=fused)
    assert folder_kind(tmp_path / "resume") is FolderKind.RESUME
    assert convert(tmp_path / "resume", tmp_path / "peft", to="peft", base=base) is FolderKind.RESUME
    assert_is(tmp_path / "peft", shape, base)
    assert convert(tmp_path / "peft", tmp_path / "again", to="resume", base=base, fused=fused) is FolderKind.PEFT
    convert(tmp_path / "again", tmp_path / "back", to="peft", base=base)
    assert_is(tmp_path / "back", shape, base)


@pytest.mark.parametrize("to", ["peft", "resume"])
@pytest.mark.parametrize("alpha", [None, 6.0])
def test_what_is_no_checkpoint_is_refused_before_everything_else(convert, tmp_path, to, alpha):
    with pytest.raises(AdapterError, match="typo does not exist"):
        convert(tmp_path / "typo", tmp_path / "new", to=to, base=tmp_path / "no_model", alpha=alpha)
    with pytest.raises(AdapterError, match=r"holds no known format: expected manifest\.json"):
        convert(tmp_path, tmp_path / "new", to=to, base=tmp_path / "no_model", alpha=alpha)
    assert not (tmp_path / "new").exists()


def peft_tensors(adapter):
    """Return module -> side -> bytes."""
    return {name: {side: t.data.tobytes() for side, t in p.tensors().items()} for name, p in adapter.pairs.items()}


@pytest.mark.parametrize("kind", ["fused-dora", "canonical-dora"])
def test_a_trained_dora_adapter_goes_both_ways(convert, open_rank, models, program, tmp_path, kind):
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    base, fused = models / "qwen2", kind == "fused-dora"
    with open_rank() as ranks:
        policy = program.policy_of(base, ranks, kind, 0.25)
        for step in range(2):
            policy.update(program.batch_of(4, step), temperature=1.0)
        save_checkpoint(policy, tmp_path / "resume")
        want = peft_tensors(policy.adapter())
    convert(tmp_path / "resume", tmp_path / "peft", to="peft", base=base)
    written = read_adapter(tmp_path / "peft")
    config = written.config
    assert (config.use_dora, config.rank, config.alpha, config.dropout) == (True, 3, 6.0, 0.25)
    assert peft_tensors(written) == want
    assert all(parts.keys() == {"a", "b", "magnitude"} for parts in want.values())
    convert(tmp_path / "peft", tmp_path / "again", to="resume", base=base, fused=fused)
    with open_rank() as ranks:
        fresh = program.policy_of(base, ranks, kind, seed=9)
        load_checkpoint(fresh, tmp_path / "again")
        assert peft_tensors(fresh.adapter()) == want
        assert fresh.optimizer.steps == 0
    convert(tmp_path / "again", tmp_path / "back", to="peft", base=base)
    back = read_adapter(tmp_path / "back")
    assert (peft_tensors(back), back.config) == (want, config)


def test_a_dora_adapter_that_peft_wrote_means_the_same_to_peft_after_all_formats(convert, models, tmp_path):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    base = models / "llama"
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=targets, use_dora=True, task_type="CAUSAL_LM")
    torch.manual_seed(4)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "resume", to="resume", base=base)
    convert(tmp_path / "resume", tmp_path / "ours", to="peft", base=base)
    ids = torch.arange(2, 14)[None]
    found = []
    for folder in ("theirs", "ours"):
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / folder)
        with torch.no_grad():
            found.append(loaded.eval()(ids).logits)
            plain = loaded.get_base_model()
    assert torch.equal(*found)
    with torch.no_grad(), loaded.disable_adapter():
        assert (plain(ids).logits - found[0]).abs().max() > 0.1


def edit_state(folder, change, file="mp_rank_00_adapter.pt"):
    import torch

    path = folder / "adapter_checkpoint" / file
    saved = torch.load(path, weights_only=True)
    change(saved["adapter_state_dict"])
    torch.save(saved, path)


def rename_one(state):
    name = "decoder.layers.0.self_attention.linear_qkv.adapter"
    state[f"{name}.adapter_q.linear_in.weight"] = state.pop(f"{name}.linear_in.weight")


class Danger:
    """Creates a folder if it is unpickled without restrictions."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def dangerous(folder):
    import torch

    torch.save({"adapter_state_dict": Danger(folder / "run")}, folder / "adapter_checkpoint" / "mp_rank_00_adapter.pt")


OUT = "decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight"


@pytest.mark.parametrize(
    ("damage", "file", "field"),
    [
        (lambda f: (f / "adapter_checkpoint/mp_rank_00_adapter.pt").unlink(), "adapter_checkpoint", "layout"),
        (
            lambda f: (f / "adapter_checkpoint/mp_rank_00_adapter.pt").rename(
                f / "adapter_checkpoint/mp_rank_00_000_001_adapter.pt"
            ),
            "mp_rank_00_000_001_adapter.pt",
            "layout",
        ),
        (
            lambda f: (f / "adapter_checkpoint/mp_rank_01_adapter.pt").write_bytes(b"PK\x03\x04no"),
            "mp_rank_01_adapter.pt",
            "file",
        ),
        (dangerous, "mp_rank_00_adapter.pt", "file"),
        (lambda f: edit_state(f, lambda s: s.clear()), "mp_rank_00_adapter.pt", "adapter_state_dict"),
        (
            lambda f: edit_state(f, rename_one),
            "mp_rank_00_adapter.pt",
            "decoder.layers.0.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight",
        ),
        (lambda f: edit_state(f, lambda s: s.pop(OUT)), "adapter_checkpoint", OUT.removesuffix(".weight")),
        (
            lambda f: edit_state(f, lambda s: s.update({OUT: s[OUT][:-2]})),
            "adapter_checkpoint",
            OUT.removesuffix(".weight"),
        ),
        (
            lambda f: edit_state(f, lambda s: s.update({OUT.replace("0", "7"): s[OUT]})),
            "mp_rank_00_adapter.pt",
            "decoder.layers.7",
        ),
    ],
)
def test_an_old_checkpoint_that_can_not_be_read_is_named(convert, models, tmp_path, damage, file, field):
    source = legacy_files(tmp_path / "old", ModelShape.read(models / "llama"), tensor=2, pipeline=1)
    damage(source)
    with pytest.raises(AdapterError) as caught:
        convert(source, tmp_path / "new", to="peft", base=models / "llama", alpha=6.0)
    assert (caught.value.file.rpartition("/")[2], caught.value.field) == (file, field)
    assert not (tmp_path / "new").exists()
    assert not (source / "run").exists()


def test_a_chunk_of_a_virtual_pipeline_is_not_taken_for_the_whole(convert, models, tmp_path):
    """verl saved only the first chunk."""
    source = legacy_files(tmp_path / "old", ModelShape.read(models / "llama"), tensor=1, pipeline=1)
    edit_state(source, lambda s: [s.pop(name) for name in list(s) if ".layers.1." in name])
    with pytest.raises(AdapterError, match=r"decoder\.layers\.1 is in none of its files; verl kept only one chunk"):
        convert(source, tmp_path / "new", to="peft", base=models / "llama", alpha=6.0)


def test_what_does_not_fit_together_is_refused(convert, models, tmp_path):
    base = models / "llama"
    source = legacy_files(tmp_path / "old", ModelShape.read(base), tensor=1, pipeline=1)
    with pytest.raises(ConfigError, match="alpha must be set for verl's old format"):
        convert(source, tmp_path / "new", to="peft", base=base)
    convert(source, tmp_path / "peft", to="peft", base=base, alpha=6.0)
    with pytest.raises(ConfigError, match="and only for that"):
        convert(tmp_path / "peft", tmp_path / "new", to="resume", base=base, alpha=6.0)
    with pytest.raises(ConfigError, match="holds an adapter in the format of PEFT already"):
        convert(tmp_path / "peft", tmp_path / "new", to="peft", base=base)
    with pytest.raises(OutputError, match="exists"):
        convert(source, tmp_path / "peft", to="peft", base=base, alpha=6.0)
    with pytest.raises(AdapterError, match="base_model_fingerprint"):
        convert(tmp_path / "peft", tmp_path / "new", to="resume", base=models / "qwen3")
    (tmp_path / "half" / "dist_ckpt").mkdir(parents=True)
    for folder, words in (("half", "writing it did not finish"), ("nowhere", "does not exist")):
        with pytest.raises(AdapterError, match=words) as caught:
            convert(tmp_path / folder, tmp_path / "new", to="peft", base=base)
        assert caught.value.field == "layout"
    convert(tmp_path / "peft", tmp_path / "resume", to="resume", base=base)
    with pytest.raises(AdapterError, match="base_model is"):
        convert(tmp_path / "resume", tmp_path / "new", to="peft", base=models / "qwen3")
    assert not (tmp_path / "new").exists()


def test_the_command_line_says_what_it_did_or_what_was_wrong(convert, models, tmp_path, capsys):
    source = legacy_files(tmp_path / "old", ModelShape.read(models / "llama"), tensor=1, pipeline=1)
    words = ["convert", str(source), str(tmp_path / "new"), "--to", "peft", "--base", str(models / "llama")]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: alpha must be set for verl's old format")
    assert main([*words, "--alpha", "6"]) == 0
    assert capsys.readouterr() == (f"{source} (verl's old adapter_checkpoint format) -> {tmp_path / 'new'}\n", "")
    assert_is(tmp_path / "new", ModelShape.read(models / "llama"), models / "llama")


def test_verls_old_format_becomes_a_peft_folder_without_megatron_core(models, tmp_path):
    """A run with any engine converts one at its start; Megatron-Core takes seconds to import."""
    source = legacy_files(tmp_path / "old", ModelShape.read(models / "llama"), tensor=1, pipeline=1)
    words = ["convert", str(source), str(tmp_path / "new"), "--to", "peft", "--base", str(models / "llama")]
    text = f"import sys; from rl_megatron_peft.cli import main; main({[*words, '--alpha', '6']}); print('megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.endswith("False\n")
    assert_is(tmp_path / "new", ModelShape.read(models / "llama"), models / "llama")


@pytest.mark.slow
def test_the_command_line_in_its_own_process(models, tmp_path):
    """A separate process, because Megatron's checkpoint writer imports the main module again."""
    source = legacy_files(tmp_path / "old", ModelShape.read(models / "llama"), tensor=1, pipeline=1)
    command = [
        sys.executable,
        "-m",
        "rl_megatron_peft",
        "convert",
        str(source),
        str(tmp_path / "new"),
        "--to",
        "resume",
    ]
    command += ["--base", str(models / "llama"), "--alpha", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert folder_kind(tmp_path / "new") is FolderKind.RESUME


def test_an_adapter_with_one_a_per_module_is_not_made_fused(convert, models, tmp_path):
    from rl_megatron_peft import Adapter, LoraPair, write_adapter
    from rl_protocol import WeightTensor

    base = models / "llama"
    source = legacy_files(tmp_path / "old", ModelShape.read(base), tensor=1, pipeline=1)
    convert(source, tmp_path / "peft", to="peft", base=base, alpha=6.0)
    adapter = read_adapter(tmp_path / "peft")
    name = "model.layers.0.self_attn.k_proj"
    doubled = 2 * adapter.pairs[name].a.data.view(np.float32)
    other = WeightTensor(name, "float32", adapter.pairs[name].a.shape, doubled.view(np.uint8))
    pairs = {**adapter.pairs, name: LoraPair(a=other, b=adapter.pairs[name].b)}
    config = LoraConfig(rank=RANK, alpha=6.0)
    write_adapter(tmp_path / "own", Adapter(base_model="", config=config, pairs=pairs))
    with pytest.raises(AdapterError, match="differ, but fused adapters share one A"):
        convert(tmp_path / "own", tmp_path / "new", to="resume", base=base, fused=True)
    assert not (tmp_path / "new").exists()
    convert(tmp_path / "own", tmp_path / "new", to="resume", base=base)
