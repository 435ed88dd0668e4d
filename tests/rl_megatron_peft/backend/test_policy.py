"""MegatronPolicyBackend in one process: its port's conformance suite, and its exports."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
from relative import apart

from rl_megatron_peft import read_adapter
from rl_protocol import BatchData, ConfigError, OutputError, ragged
from rl_protocol.ports import PolicyBackend
from rl_protocol.testing.training_suite import PolicyBackendSuite


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


def test_the_adapter_travels_under_the_names_of_its_files(policy, program, tmp_path):
    from safetensors.numpy import load_file

    policy.update(program.batch_of(4, 0), temperature=1.0)
    write = policy.export()
    policy.update(program.batch_of(4, 1), temperature=1.0)  # the export keeps the earlier weights
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


def test_an_update_without_a_finite_gradient_makes_no_step_and_has_no_norm(policy, program):
    before = {weight.name: weight.data.tobytes() for weight in policy.adapter_weights()}
    batch = program.batch_of(4, 0)
    nan = ragged([[np.nan] * len(row) for row in batch.ragged("advantages").rows()], "float32")
    metrics = policy.update(BatchData({**batch.columns, "advantages": nan}), temperature=1.0)
    assert metrics["actor/skipped_steps"] == 1.0
    assert np.isnan(metrics["actor/grad_norm"])
    assert {weight.name: weight.data.tobytes() for weight in policy.adapter_weights()} == before


def test_a_skipped_step_after_a_resume_has_the_rate_of_the_step_before_it(models, ranks, program):
    before, after = (
        program.policy_of(models / "llama", ranks, "fused", lr_schedule=lambda step: 0.5**step) for _ in range(2)
    )
    batch = program.batch_of(4, 0)
    made = before.update(batch, temperature=1.0)
    state = {key: part for _, parts in before.optimizer.state() for key, part in parts.items()}
    after.optimizer.load_state(state, before.optimizer.steps)
    nan = ragged([[np.nan] * len(row) for row in batch.ragged("advantages").rows()], "float32")
    skipped = after.update(BatchData({**batch.columns, "advantages": nan}), temperature=1.0)
    assert (made["actor/skipped_steps"], skipped["actor/skipped_steps"]) == (0.0, 1.0)
    assert skipped["actor/lr"] == made["actor/lr"] > 0


@pytest.fixture
def whole(ranks, models, program):
    return program.policy_of(models / "even", ranks, "whole")


class Gathering:
    """A mapping that notes which weights were gathered."""

    def __init__(self, mapping, names):
        self._mapping, self._names = mapping, names

    def weights(self, *arguments):
        for name, weight in self._mapping.weights(*arguments):
            self._names.append(name)
            yield name, weight


def test_all_weights_are_trained_sent_and_written_as_a_model(whole, models, program, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    before = {weight.name: weight.data.tobytes() for weight in whole.named_weights()}
    whole.update(program.batch_of(6, 0), temperature=1.0)
    sent = {weight.name: weight.data.tobytes() for weight in whole.named_weights()}
    assert sent.keys() == before.keys()
    assert not [name for name in sent if sent[name] == before[name]]
    follower, gathered = dataclasses.replace(whole.settings, sends=False), []
    with monkeypatch.context() as patched:
        patched.setattr(whole, "settings", follower)
        patched.setattr(whole, "_mapping", Gathering(whole._mapping, gathered))
        assert list(whole.named_weights()) == []
    assert gathered == list(sent), "it takes part to the end"
    whole.save_pretrained(tmp_path / "trained")
    write = whole.export()
    batch = program.batch_of(3, 1)
    want = whole.compute_log_probs(batch, temperature=1.0).ragged("log_probs").rows()
    whole.update(program.batch_of(6, 1), temperature=1.0)
    (tmp_path / "copy").mkdir()
    write(tmp_path / "copy")  # the weights at the time of `export`
    for folder in ("trained", "copy"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        assert {name: t.numpy().tobytes() for name, t in model.state_dict().items()} == sent
    for prompt, response, log_probs in zip(
        batch.ragged("prompts").rows(), batch.ragged("responses").rows(), want, strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits, -1)[range(len(response)), list(response)]
        assert apart(found, log_probs, logits) < 1e-5
    with pytest.raises(OutputError, match="exists; only new folders are written"):
        whole.save_pretrained(tmp_path / "trained")


def test_a_whole_policy_has_no_adapter_and_no_past(whole, program, tmp_path):
    for ask in (
        whole.adapter,
        lambda: list(whole.adapter_weights()),
        lambda: whole.load_adapter(tmp_path),
        lambda: whole.compute_reference_log_probs(program.batch_of(2, 0), temperature=1.0),
    ):
        with pytest.raises(ConfigError, match="it has no adapter and no copy of its first weights"):
            ask()


def test_bfloat16_computes_as_transformers_does_and_trains_in_float32(ranks, models, program):
    """Rounding order differs: ours may be twice as far from float32 as transformers' result."""
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
        np.testing.assert_allclose(*curves, atol=0.1)  # the loss falls by 0.7
        for one, state in half.optimizer.state():
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}
            if kind == "whole":
                held = one.fuse([state[key] for key in one.keys])
                assert one.parameter.dtype == torch.bfloat16
                assert torch.equal(one.parameter, held.bfloat16())
                # more precise than the model's weights
                assert not torch.equal(held, held.bfloat16().float())


def test_a_frozen_policy_computes_the_same_and_holds_its_weights_only(ranks, models, program):
    """An optimizer of bfloat16 weights holds float32 copies of them from the start."""
    import torch

    trained, frozen = (
        program.policy_of(models / "even", ranks, "whole", frozen=frozen, dtype=torch.bfloat16)
        for frozen in (False, True)
    )
    weights = sum(parameter.nbytes for parameter in frozen.model.parameters())
    assert held_bytes(trained) >= 3 * weights
    assert weights <= held_bytes(frozen) < 1.1 * weights  # rotary frequencies beside them
    batch = program.batch_of(3, 1)
    found = [p.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values for p in (trained, frozen)]
    assert found[0].tobytes() == found[1].tobytes()
    for ask in (lambda: frozen.update(batch, temperature=1.0), frozen.snapshot, lambda: frozen.optimizer):
        with pytest.raises(ConfigError, match="built frozen, as a reference"):
            ask()
    assert all(parameter.grad is None for parameter in frozen.model.parameters())


def held_bytes(policy):
    """Bytes of the tensors to which a policy's attributes refer, directly or through others."""
    import gc
    import types

    import torch

    stops = (types.ModuleType, types.FunctionType, type)
    left, seen, memory = list(vars(policy).values()), set(), {}
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, stops):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            memory[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        left.extend(gc.get_referents(one))
    return sum(memory.values())
