"""The critic passes its port's suite and agrees with transformers and torch."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from rl_megatron_peft import AdapterError
from rl_protocol import OutputError
from rl_protocol.ports import CriticBackend
from rl_protocol.testing.training_suite import CriticBackendSuite, tokens

TOLERANCE = 1e-4


class TestMegatronCritic(CriticBackendSuite):
    """With LoRA: adapters and head are trained."""

    kind = "fused"

    @pytest.fixture(autouse=True)
    def _made_here(self, ranks, models, program):
        self.make = lambda: program.critic_of(models / "qwen2", ranks, self.kind, loss=self.loss)

    @staticmethod
    def loss(values, micro, counts):
        import torch

        error = values - torch.tensor(micro.ragged("returns").values)
        return error.square().sum() / counts.tokens, {"vf_loss": (float(error.detach().square().sum()), len(error))}

    @contextmanager
    def open_critic(self):
        critic = self.make()
        assert isinstance(critic, CriticBackend)
        yield critic


class TestWholeCritic(TestMegatronCritic):
    """Without LoRA: all weights are trained."""

    kind = "whole"


def test_first_values_are_0_and_the_frozen_base_is_as_it_was(ranks, models, program):
    import torch

    from rl_megatron_peft.backend.critic import MegatronCriticBackend

    critic = MegatronCriticBackend(
        models / "llama", ranks=ranks, **program.arguments_of("fused", loss=program.value_loss)
    )
    assert not critic.compute_values(tokens()).ragged("values").values.any()
    frozen = {name: p.detach().clone() for name, p in critic.model.named_parameters() if not p.requires_grad}
    for step in range(2):
        critic.update(program.batch_of(4, step))
    assert critic.compute_values(tokens()).ragged("values").values.any()
    now = dict(critic.model.named_parameters())
    assert len(frozen) > 10
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    assert not [name for name in now if "output_layer" in name and ".value." not in name]


@pytest.mark.parametrize("kind", ["fused", "whole"])
def test_policy_and_critic_refuse_snapshots_of_each_other(ranks, models, program, tmp_path, kind):
    """The names of their adapters and weights are the same."""
    critic, policy = (make(models / "qwen2", ranks, kind) for make in (program.critic_of, program.policy_of))
    for name, one, other in (("critic", critic, policy), ("policy", policy, critic)):
        (tmp_path / name).mkdir()
        one.snapshot()(tmp_path / name)
        with pytest.raises(AdapterError, match="base_model is not the model's") as caught:
            other.restore(tmp_path / name)
        assert caught.value.field == "base_model"


def test_bfloat16_has_its_head_in_float32(ranks, models, program):
    import torch

    full = program.critic_of(models / "even", ranks, "whole")
    half = program.critic_of(models / "even", ranks, "whole", dtype=torch.bfloat16)
    assert {p.dtype for name, p in half.model.named_parameters() if "output_layer" in name} == {torch.float32}
    values = [program.values_of(critic) for critic in (full, half)]
    assert 0 < np.abs(values[0] - values[1]).max() < 0.1 * np.ptp(values[0])


def values_of_transformers(folder, batch):
    """Return the values [T] of a model with one label, computed row by row."""
    import torch
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert model.num_labels == 1
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            found.append(model(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1, 0])
    return torch.cat(found).numpy()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "canonical-dora"),
        ("qwen2", "fused"),
        ("tied", "whole"),
        ("even", "whole"),
        ("moe", "whole"),
        ("moe", "fused"),
    ],
)
def test_what_is_written_has_the_same_values_in_transformers(ranks, models, moe_model, program, tmp_path, family, kind):
    critic = program.critic_of(moe_model if family == "moe" else models / family, ranks, kind)
    before = program.values_of(critic)
    for step in range(2):
        critic.update(program.batch_of(6, step))
    critic.save_pretrained(tmp_path / "critic")
    values = program.values_of(critic)
    assert np.abs(values - before).max() > 0.05
    found = values_of_transformers(tmp_path / "critic", program.batch_of(5, 99))
    assert np.abs(found - values).max() < TOLERANCE
    with pytest.raises(OutputError, match="exists; only new folders are written"):
        critic.save_pretrained(tmp_path / "critic")


@pytest.fixture(scope="module")
def value_model(models, program):
    """Return (values before, values after, losses) of a transformers model trained by torch."""
    import torch
    from transformers import AutoModelForCausalLM

    body = AutoModelForCausalLM.from_pretrained(models / "tied").base_model.eval()
    head = torch.nn.Linear(32, 1)
    head.load_state_dict(
        {name.removeprefix("value_head."): torch.tensor(value) for name, value in program.HEAD.items()}
    )
    weights = [*body.parameters(), *head.parameters()]
    adam = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)

    def values(batch):
        rows = zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True)
        hidden = [body(torch.tensor([*p, *r])[None]).last_hidden_state[0, len(p) - 1 : -1] for p, r in rows]
        return head(torch.cat(hidden))[:, 0]

    losses, before = [], values(program.batch_of(5, 99)).detach().numpy()
    for step in range(6):
        batch = program.batch_of(7, step % 3)
        mask, returns = (torch.tensor(batch.ragged(name).values) for name in ("response_mask", "advantages"))
        loss = 0.5 * (values(batch) - returns)[mask].square().mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        adam.step()
        losses.append(loss.item())
    return before, values(program.batch_of(5, 99)).detach().numpy(), losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2", "zero2", "sp2", "tp2pp2"])
def test_a_critic_is_what_transformers_and_torch_make_of_it(runs, value_model, layout):
    """Includes a model with tied output layer: with a value head, several stages can split it."""
    before, after, losses = value_model
    found = np.load(runs / layout / "critic-tied.npz")
    assert np.abs(after - before).max() > 0.1
    assert np.abs(found["before"] - before).max() < TOLERANCE
    assert np.abs(found["after"] - after).max() < TOLERANCE
    assert np.abs(found["critic/vf_loss"] - losses).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "zero2", "sp2", "tp2pp2"])
@pytest.mark.parametrize("family", ["tied", "llama"])
def test_any_layout_writes_it_for_transformers(runs, program, layout, family):
    """All weights, or with the adapters merged."""
    found = values_of_transformers(runs / layout / f"critic-{family}-model", program.batch_of(5, 99))
    assert np.abs(found - np.load(runs / layout / f"critic-{family}.npz")["after"]).max() < TOLERANCE


def check_critic(folder, layout, family):
    """Compares a layout with one rank, also after restoring another layout's snapshot."""
    one, many = (np.load(folder / name / f"critic-{family}.npz") for name in ("one", layout))
    assert np.abs(one["after"] - one["before"]).max() > 0.1
    for name in one.files:
        assert np.abs(many[name] - one[name]).max() < TOLERANCE, name
    assert np.abs(many["again"] - one["after"]).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2", "zero2", "sp2", "tp2pp2"])
@pytest.mark.parametrize("family", ["tied", "llama"])
def test_a_critic_is_trained_and_resumed_the_same_under_every_layout(runs, layout, family):
    check_critic(runs, layout, family)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "zero2", "tp2pp2", "sp2pp2", "zero2tp2"])
def test_norms_of_queries_and_keys_are_trained_the_same_under_a_value_head(more_runs, layout):
    check_critic(more_runs, layout, "even")
