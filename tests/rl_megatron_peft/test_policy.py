"""The Megatron policy in one process: the conformance suite of its port, and everything that must be refused by file and field."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from rl_megatron_peft import (
    Adapter,
    AdapterError,
    Layout,
    LoraConfig,
    LoraPair,
    ModelShape,
    fingerprint,
    read_adapter,
    write_adapter,
)
from rl_protocol import ConfigError, OutputError, WeightTensor
from rl_protocol.ports import PolicyBackend
from rl_protocol.testing.training import PolicyBackendSuite

pytestmark = [  # Megatron-Core 0.16 says once what it does without Transformer Engine and Apex, and calls what torch renamed
    pytest.mark.filterwarnings("ignore:.*not installed"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def policy(ranks, models, program):
    return program.policy_of(models / "llama", ranks, "fused")


class TestMegatronPolicy(PolicyBackendSuite):
    @pytest.fixture(autouse=True)
    def _made_here(self, ranks, models, program):
        self.make = lambda: program.policy_of(models / "qwen2", ranks, "fused")

    @contextmanager
    def open_policy(self):
        policy = self.make()
        assert isinstance(policy, PolicyBackend)
        yield policy


class TestWholePolicy(TestMegatronPolicy):
    """Without LoRA: all weights are trained."""

    @pytest.fixture(autouse=True)
    def _made_here(self, ranks, models, program):
        self.make = lambda: program.policy_of(models / "qwen2", ranks, "whole")


def state(policy):
    return {f.key: f.parameter.detach().numpy().tobytes() for lora in policy.adapters for f in lora.factors()}


def refused(policy, path, field, message):
    """The adapter is refused by file and field, and the policy stays as it was."""
    before = state(policy)
    with pytest.raises(AdapterError, match=message) as caught:
        policy.load_adapter(path)
    assert caught.value.file.startswith(str(path))
    assert caught.value.field == field
    assert state(policy) == before


def changed(adapter, **config):
    """The adapter with another configuration, and factors that fit it."""
    import dataclasses

    new = dataclasses.replace(adapter.config, **config)

    def cut(weight: WeightTensor, axis: int) -> WeightTensor:
        array = weight.data.view("float32").reshape(weight.shape)
        array = array[: new.rank] if axis == 0 else array[:, : new.rank]
        return WeightTensor(weight.name, "float32", array.shape, array.copy().reshape(-1).view("uint8"))

    def long(b: WeightTensor) -> WeightTensor | None:
        return WeightTensor(b.name, "float32", b.shape[:1], b.data[: 4 * b.shape[0]]) if new.use_dora else None

    kept = {name: pair for name, pair in adapter.pairs.items() if new.covers(name)}
    pairs = {name: LoraPair(a=cut(p.a, 0), b=cut(p.b, 1), magnitude=long(p.b)) for name, p in kept.items()}
    return Adapter(base_model="x", config=new, pairs=pairs, fingerprint=adapter.fingerprint)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"rank": 2}, "rank", "the rank of model.layers.0.mlp.down_proj is 2, the model's is 3"),
        ({"alpha": 3.0}, "alpha", "the scale of model.layers.0.mlp.down_proj is 1.0, the model's is 2.0"),
        ({"use_dora": True}, "use_dora", "use_dora is True, the model's is False"),
        ({"target_modules": ATTENTION}, "model.layers.0.mlp.down_proj", "it lacks .*model.layers.1.mlp.up_proj"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(policy, tmp_path, config, field, message):
    write_adapter(tmp_path / "a", changed(policy.adapter(), **config))
    refused(policy, tmp_path / "a", field, message)


def test_an_adapter_of_another_base_model_is_refused(policy, ranks, models, program, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "llama", other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-2] ^= 64
    (other / "model.safetensors").write_bytes(raw)
    program.policy_of(other, ranks, "fused").save_pretrained(tmp_path / "a")
    refused(policy, tmp_path / "a", "base_model_fingerprint", "they must be the same")


def test_a_truncated_adapter_is_refused(policy, tmp_path):
    policy.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(policy, tmp_path / "a", "file", "adapter_model.safetensors: file is not what adapter_manifest.json says")
    (tmp_path / "a" / "adapter_manifest.json").unlink()
    refused(policy, tmp_path / "a", "header", "adapter_model.safetensors: header is not a safetensors header")


def test_fused_adapters_do_not_take_an_a_of_each_part_own(policy, ranks, models, program, tmp_path):
    own = program.policy_of(models / "llama", ranks, "fused", fused=False)
    own.save_pretrained(tmp_path / "a")
    refused(policy, tmp_path / "a", "model.layers.0.mlp.up_proj.lora_A", "attach with fused=False")
    policy.save_pretrained(tmp_path / "b")  # the other way is fine: an A that is shared is an A of one's own
    own.load_adapter(tmp_path / "b")
    assert {name: pair.a.data.tobytes() for name, pair in own.adapter().pairs.items()} == {
        name: pair.a.data.tobytes() for name, pair in policy.adapter().pairs.items()
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"target_modules": ("q_proj", "v_proj")},
            r"layers.0.self_attn.k_proj is no target. Target it, or set fused=False",
        ),
        ({"exclude": ("layers.1.mlp.up_proj",)}, "model.layers.1.mlp.up_proj is no target"),
    ],
)
def test_adapters_that_can_not_be_attached_are_refused(ranks, models, program, config, message):
    with pytest.raises(ConfigError, match=message):
        program.policy_of(models / "llama", ranks, "fused", lora=LoraConfig(rank=2, **config))


def test_excluded_modules_have_no_adapter(ranks, models, program):
    lora = LoraConfig(rank=2, exclude=("layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"))
    policy = program.policy_of(models / "llama", ranks, "fused", lora=lora, fused=False)
    policy.update(program.batch_of(4, 0), temperature=1.0)
    assert len(policy.adapter().pairs) == 12
    assert "model.layers.0.mlp.up_proj" not in policy.adapter().pairs


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + bytes(9)),
            "model.safetensors: file can't be read",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors file"),
        (
            lambda folder: edit(folder, intermediate_size=96),
            r"mlp.gate_proj.weight has shape \(48, 32\); config.json makes it \(96, 32\)",
        ),
        (lambda folder: edit(folder, num_hidden_layers=3), r"model.layers.2.input_layernorm.weight is in none of its"),
        (lambda folder: edit(folder, model_type="gemma"), "model_type must be one of llama, qwen2, qwen3; got 'gemma'"),
        (lambda folder: edit(folder, mlp_bias=True), "mlp_bias must be False; got True"),
        (lambda folder: edit(folder, hidden_size="32"), "hidden_size must be an integer >= 1; got '32'"),
        (
            lambda folder: edit(folder, rope_parameters={"rope_type": "yarn"}),
            "rope_parameters must be of type 'default'",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read as a model configuration"),
    ],
)
def test_a_base_model_that_can_not_be_loaded_is_named(ranks, models, program, tmp_path, damage, message):
    shutil.copytree(models / "llama", tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ConfigError, match=message):
        program.policy_of(tmp_path / "m", ranks, "fused")


def edit(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_model_in_several_files_is_the_same_model(ranks, models, program, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models / "llama").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "m") == fingerprint(models / "llama")
    whole, parts = (program.policy_of(path, ranks, "fused") for path in (models / "llama", tmp_path / "m"))
    pairs = zip(whole.named_weights(), parts.named_weights(), strict=True)
    assert all((a.name, a.data.tobytes()) == (b.name, b.data.tobytes()) for a, b in pairs)
    assert [w.name for w in whole.named_weights()] == list(ModelShape.read(models / "llama").tensors())


@pytest.fixture(scope="module")
def checkpoint(ranks, models, program, tmp_path_factory):
    """A checkpoint after one step."""
    from rl_megatron_peft.backend.resume import save_checkpoint

    policy = program.policy_of(models / "llama", ranks, "fused")
    policy.update(program.batch_of(4, 0), temperature=1.0)
    path = tmp_path_factory.mktemp("resume") / "step-1"
    save_checkpoint(policy, path)
    with pytest.raises(OutputError, match="exists; a checkpoint is written to a new folder"):
        save_checkpoint(policy, path)
    assert [p.name for p in path.parent.iterdir()] == ["step-1"]
    return path


def edit_manifest(path, **fields):
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def flip(path):
    file = max((path / "dist_ckpt").glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "field", "message"),
    [
        (lambda path: edit_manifest(path, rank=8), "rank", r"manifest.json: rank is 8, the model's is 3"),
        (lambda path: edit_manifest(path, base_model="f00"), "base_model", "base_model is 'f00'"),
        (lambda path: edit_manifest(path, fused=False), "fused", "fused is False"),
        (lambda path: edit_manifest(path, use_dora=True), "use_dora", "use_dora is True"),
        (lambda path: edit_manifest(path, steps=None), "steps", "steps is missing or no int"),
        (lambda path: edit_manifest(path, format="other"), "layout", "expected manifest.json of format"),
        (flip, "file", r"\.distcp: file is not what manifest.json says"),
        (lambda path: (path / "dist_ckpt" / "common.pt").unlink(), "file", "common.pt: file is not what"),
        (lambda path: (path / "manifest.json").unlink(), "layout", "writing it did not end"),
        (lambda path: (path / "manifest.json").write_text("{"), "layout", "expected manifest.json of format"),
    ],
)
def test_a_checkpoint_that_can_not_be_resumed_is_refused(policy, checkpoint, tmp_path, damage, field, message):
    from rl_megatron_peft.backend.resume import load_checkpoint

    shutil.copytree(checkpoint, tmp_path / "c")
    damage(tmp_path / "c")
    before = state(policy)
    with pytest.raises(AdapterError, match=message) as caught:
        load_checkpoint(policy, tmp_path / "c")
    assert caught.value.file.startswith(str(tmp_path / "c"))
    assert caught.value.field == field
    assert state(policy) == before
    load_checkpoint(policy, checkpoint)
    assert state(policy) != before


def edit_state(folder, **fields):
    file = folder / "adapter_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("stage-*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.down_proj.lora_A"]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda folder: edit_state(folder, base_model="f00"), "base_model"),
        (lambda folder: edit_state(folder, rank=8), "rank"),
        (lambda folder: edit_state(folder, updates=None), "updates"),
        (lambda folder: (folder / "adapter_state.json").write_text("[]"), "base_model"),
        (lambda folder: (folder / "adapter_state.json").unlink(), "file"),
        (lambda folder: [file.write_bytes(b"\x08" + bytes(9)) for file in folder.glob("stage-*")], "file"),
        (without_a_tensor, "model.layers.0.mlp.down_proj.lora_A"),
    ],
)
def test_a_snapshot_that_can_not_be_restored_is_refused(policy, ranks, models, program, tmp_path, damage, field):
    trained = program.policy_of(models / "llama", ranks, "fused")
    trained.update(program.batch_of(4, 0), temperature=1.0)
    assert all(file.is_file() for file in trained.snapshot()(tmp_path))
    before = state(policy)
    policy.restore(tmp_path)
    assert program.same_state(policy, trained)
    fresh = program.policy_of(models / "llama", ranks, "fused")
    damage(tmp_path)
    with pytest.raises(AdapterError) as caught:
        fresh.restore(tmp_path)
    assert caught.value.field == field
    assert state(fresh) == before


def test_the_adapter_travels_under_the_names_of_its_files(policy, program, tmp_path):
    from safetensors.numpy import load_file

    policy.update(program.batch_of(4, 0), temperature=1.0)
    write = policy.export()
    policy.update(program.batch_of(4, 1), temperature=1.0)  # the copy is of before
    (tmp_path / "now").mkdir()
    files = write(tmp_path / "now")
    assert {"adapter_config.json", "adapter_model.safetensors", "adapter_manifest.json"} <= {
        file.name for file in files
    }
    assert read_adapter(tmp_path / "now").pairs.keys() == policy.adapter().pairs.keys()
    policy.save_pretrained(tmp_path / "later")
    written = load_file(tmp_path / "later" / "adapter_model.safetensors")
    sent = {weight.name: weight for weight in policy.adapter_weights()}
    assert sent.keys() == written.keys()
    assert all(sent[name].data.tobytes() == written[name].tobytes() for name in sent)
    earlier = load_file(tmp_path / "now" / "adapter_model.safetensors")
    assert any(not np.array_equal(written[name], earlier[name]) for name in written)


def test_a_mapping_that_is_not_installed_is_refused_and_ours_takes_its_place(
    policy, ranks, models, program, monkeypatch
):
    import importlib.util

    from rl_megatron_peft.backend import bridge
    from rl_megatron_peft.backend.mapping import OwnMapping, best_mapping

    assert isinstance(best_mapping(models / "llama", policy.shape, ranks), OwnMapping)
    with pytest.raises(
        ConfigError, match=r"not installed; install 'rl-megatron-peft\[bridge\]'; or leave the mapping to"
    ):
        program.policy_of(models / "llama", ranks, "fused", mapping=bridge.BridgeMapping)
    spec = importlib.util.spec_from_loader("megatron.bridge", None)
    monkeypatch.setattr(bridge, "find_spec", {"megatron.bridge": spec, "transformer_engine": None}.get)
    for version, message in (("0.3.9", "without Transformer Engine"), ("0.4.2", "0.4.2 is installed, known are 0.3")):
        monkeypatch.setattr(bridge.metadata, "version", {"megatron-bridge": version}.get)
        assert message in bridge.bridge_problem(policy.shape, Layout())


@pytest.fixture
def whole(ranks, models, program):
    return program.policy_of(models / "even", ranks, "whole")


def test_all_weights_are_trained_sent_and_written_as_a_model(whole, models, program, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    before = {weight.name: weight.data.tobytes() for weight in whole.named_weights()}
    whole.update(program.batch_of(6, 0), temperature=1.0)
    sent = {weight.name: weight.data.tobytes() for weight in whole.named_weights()}
    assert sent.keys() == before.keys()
    assert not [name for name in sent if sent[name] == before[name]]
    whole.save_pretrained(tmp_path / "trained")
    write = whole.export()
    batch = program.batch_of(3, 1)
    want = whole.compute_log_probs(batch, temperature=1.0).ragged("log_probs").rows()
    whole.update(program.batch_of(6, 1), temperature=1.0)
    (tmp_path / "copy").mkdir()
    write(tmp_path / "copy")  # as it was when it was copied
    for folder in ("trained", "copy"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        assert {name: t.numpy().tobytes() for name, t in model.state_dict().items()} == sent
    for prompt, response, log_probs in zip(
        batch.ragged("prompts").rows(), batch.ragged("responses").rows(), want, strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits, -1)[range(len(response)), list(response)]
        np.testing.assert_allclose(found.numpy(), log_probs, atol=1e-5)
    with pytest.raises(OutputError, match="exists; only new folders are written"):
        whole.save_pretrained(tmp_path / "trained")


def test_a_whole_policy_goes_on_from_its_snapshot_and_from_no_adapter(whole, policy, ranks, models, program, tmp_path):
    whole.update(program.batch_of(4, 0), temperature=1.0)
    whole.snapshot()(tmp_path)
    again = program.policy_of(models / "even", ranks, "whole")
    again.restore(tmp_path)
    assert program.same_state(whole, again)
    pairs = zip(whole.named_weights(), again.named_weights(), strict=True)
    assert all(a.data.tobytes() == b.data.tobytes() for a, b in pairs)
    with pytest.raises(AdapterError, match="base_model"):
        policy.restore(tmp_path)
    adapted = program.policy_of(models / "even", ranks, "fused")
    with pytest.raises(AdapterError, match="rank is not the model's 3"):
        adapted.restore(tmp_path)
    adapted.snapshot()(tmp_path)
    with pytest.raises(AdapterError, match="trained is not the model's 'all weights'"):
        whole.restore(tmp_path)


def test_a_whole_policy_has_no_adapter_and_no_past(whole, program, tmp_path):
    for ask in (
        whole.adapter,
        lambda: list(whole.adapter_weights()),
        lambda: whole.load_adapter(tmp_path),
        lambda: whole.compute_reference_log_probs(program.batch_of(2, 0), temperature=1.0),
    ):
        with pytest.raises(ConfigError, match="it has no adapter, and does not know what it was before"):
            ask()


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("qwen2", {"pipeline": 2}, "output layer is its embedding needs them in one stage; got pipeline=2"),
        ("llama", {"tensor": 2}, "a vocabulary that its ranks divide; got 15 for tensor=2"),
    ],
)
def test_layouts_in_which_not_all_weights_can_be_trained_are_refused(policy, ranks, models, family, layout, message):
    import dataclasses

    from rl_megatron_peft.backend.trained import trained_weights

    cut = dataclasses.replace(ranks, layout=Layout(**layout))
    with pytest.raises(ConfigError, match=message):
        list(trained_weights(policy.model, ModelShape.read(models / family), cut))


def test_dropout_keeps_the_mean_and_half_of_the_inputs(ranks, models, program):
    import torch

    from rl_megatron_peft.backend.lora import Draw, attach
    from rl_megatron_peft.backend.model import build_model

    shape, draw = ModelShape.read(models / "llama"), Draw()
    config = LoraConfig(rank=1, alpha=1, dropout=0.5, target_modules=("down_proj",))
    lora = attach(build_model(shape, ranks), config, shape, ranks, draw=draw)[0]
    with torch.no_grad():
        lora.a["down_proj"].fill_(1)
        lora.b["down_proj"].fill_(1)

    def total():
        with torch.no_grad():
            return float(lora(torch.ones(1, 1, shape.ffn))[0, 0, 0])

    assert total() == shape.ffn == 48
    sums = []
    for step in range(400):
        draw.pass_name = f"{step}/0/0"
        sums.append(total())
        assert sums[-1] == total()
    assert {value % 2 for value in sums} == {0.0}  # each input is dropped or doubled
    assert len(set(sums)) > 10
    assert abs(np.mean(sums) - 48) < 1.5  # its deviation is sqrt(48 / 400), 0.35


def test_dropout_is_of_training_alone_and_the_same_again(ranks, models, program):
    def make(dropout, seed=5):
        return program.policy_of(models / "llama", ranks, "fused", dropout, seed=seed)

    trained = make(0.5)
    for step in range(2):
        trained.update(program.batch_of(6, step), temperature=1.0)
    again, other = make(0.5), make(0.0)
    for step in range(2):
        again.update(program.batch_of(6, step), temperature=1.0)
        other.update(program.batch_of(6, step), temperature=1.0)
    assert state(again) == state(trained) != state(other)
    for one, two in zip(other.adapters, trained.adapters, strict=True):
        one.load_state_dict(two.state_dict())
    batch = program.batch_of(4, 9)
    found = [p.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values for p in (trained, other)]
    assert np.array_equal(*found)


def with_masks_of(policy, model, batch, pass_name):
    """A model of peft whose adapters drop what the policy's drop in that pass, where all rows are one micro-batch.

    Masks as they are documented: of the run's seed, the pass and the layer, drawn over [places, rows, inputs].
    """
    import zlib

    import torch

    from rl_megatron_peft.naming import HFModule

    class Fixed(torch.nn.Module):
        def __init__(self, name, inputs, dropout):
            super().__init__()
            megatron = HFModule.parse(name.removeprefix("base_model.model.")).megatron.name
            generator = torch.Generator().manual_seed(zlib.crc32(f"5/{pass_name}/{megatron}".encode()))
            kept = torch.rand(*size, inputs, generator=generator) >= dropout
            self.mask = (kept / (1 - dropout)).transpose(0, 1)

        def forward(self, x):
            return x * self.mask

    lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
    size = (int(lengths.max()), len(batch))
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = Fixed(name, module.in_features, policy.lora.dropout)
    return model.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["fused-dora", "canonical-dora"])
def test_the_gradients_of_dora_are_those_of_peft(ranks, models, program, tmp_path, kind, dropout):
    """Of A, B and magnitudes, away from where they start, where B A is 0 and nothing depends on what passes gradients on."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from rl_megatron_peft.backend.optimise import AdamConfig
    from rl_megatron_peft.backend.passes import token_places
    from rl_megatron_peft.backend.policy import MiniBatchCounts

    settings = {"adam": AdamConfig(lr=3e-2, grad_clip=1e9), "micro_batch_rows": 0}
    policy = program.policy_of(models / "qwen2", ranks, kind, dropout, **settings)
    for step in range(2):
        policy.update(program.batch_of(6, step), temperature=1.0)
    policy.save_pretrained(tmp_path / "a")
    batch = program.batch_of(6, 2)
    reported = policy.update(batch, temperature=1.0)
    base = AutoModelForCausalLM.from_pretrained(models / "qwen2")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "a", is_trainable=True).eval()
    if dropout:
        model = with_masks_of(policy, model, batch, "2/0/0")
    tokens = token_places(batch, torch.device("cpu"))
    log_p = torch.log_softmax(model(tokens.ids).logits[tokens.row, tokens.place, :15], -1)
    taken = log_p.gather(-1, tokens.targets[:, None])[:, 0]
    counts = MiniBatchCounts(tokens=int(batch.ragged("response_mask").values.sum()), sequences=6)
    loss = program.loss(taken, -(log_p.exp() * log_p).sum(-1), batch, counts)[0]
    assert reported["actor/loss"] == pytest.approx(loss.item(), abs=1e-5)
    loss.backward()
    theirs = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = {factor.key: factor.parameter.grad for lora in policy.adapters for factor in lora.factors()}
    for name, want in theirs.items():
        key = name.removesuffix(".default.weight")
        if key in ours:  # a shared A has the sum of their gradients
            torch.testing.assert_close(ours.pop(key), want, atol=1e-5, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    assert all(".linear_" in key and key.endswith(".lora_A") for key in ours)
    assert bool(ours) == (kind == "fused-dora")


def test_bfloat16_computes_as_transformers_does_and_trains_in_float32(ranks, models, program):
    """Both are rounded, in other orders: ours may be twice as far from float32 as transformers is."""
    import torch
    from transformers import AutoModelForCausalLM

    batch = program.batch_of(16, 3)

    def reference(dtype):
        model = AutoModelForCausalLM.from_pretrained(models / "even", dtype=dtype).eval()
        found = []
        for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1].float()
            found.append(torch.log_softmax(logits, -1)[range(len(response)), list(response)].numpy())
        return np.concatenate(found)

    exact, rounded = reference(torch.float32), reference(torch.bfloat16)
    for kind in ("fused", "whole"):
        half = program.policy_of(models / "even", ranks, kind, dtype=torch.bfloat16)
        found = half.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values
        assert 0 < np.abs(found - exact).mean() < 2 * np.abs(rounded - exact).mean()
        full = program.policy_of(models / "even", ranks, kind)
        curves = [[p.update(batch, temperature=1.0)["actor/loss"] for _ in range(5)] for p in (half, full)]
        np.testing.assert_allclose(*curves, atol=0.1)  # of a loss that falls by 0.7
        for one, state in half.optimiser.state():
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}
            if kind == "whole":
                held = one.joined([state[key] for key in one.keys])
                assert one.parameter.dtype == torch.bfloat16
                assert torch.equal(one.parameter, held.bfloat16())
                assert not torch.equal(held, held.bfloat16().float())  # what the model can't hold is kept


def test_an_exported_adapter_is_no_checkpoint(policy, tmp_path):
    from rl_megatron_peft.backend.resume import load_checkpoint

    policy.save_pretrained(tmp_path / "a")
    assert read_adapter(tmp_path / "a").config == policy.lora
    with pytest.raises(AdapterError, match="it holds no optimizer; load it as an adapter"):
        load_checkpoint(policy, tmp_path / "a")


def test_torch_is_as_it_was_after_computing_on_the_cpu():
    import torch

    from rl_megatron_peft.backend.compat import capabilities, cpu_compat

    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="leave it out"), cpu_compat():
            pass
        return
    before = torch.cuda.current_device, torch.cuda.synchronize
    with cpu_compat():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    with pytest.raises(KeyError), cpu_compat():
        raise KeyError
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    assert capabilities().device == "cpu"
