"""Dropout of adapter inputs: its mean, and when it applies."""

from __future__ import annotations

import numpy as np

from rl_megatron_peft import (
    LoraConfig,
    ModelShape,
)


def test_dropout_keeps_the_mean_and_half_of_the_inputs(ranks, models, program):
    import torch

    from rl_megatron_peft.backend.lora.attach import attach
    from rl_megatron_peft.backend.lora.dropout import DropoutContext
    from rl_megatron_peft.backend.model.gpt import build_model

    shape, context = ModelShape.read(models / "llama"), DropoutContext()
    config = LoraConfig(rank=1, alpha=1, dropout=0.5, target_modules=("down_proj",))
    lora = attach(build_model(shape, ranks), config, shape, ranks, dropout_context=context)[0]
    with torch.no_grad():
        lora.a["down_proj"].fill_(1)
        lora.b["down_proj"].fill_(1)

    def total():
        with torch.no_grad():
            return float(lora(torch.ones(1, 1, shape.ffn))[0, 0, 0])

    assert total() == shape.ffn == 48
    sums = []
    for step in range(400):
        context.pass_name = f"{step}/0/0"
        sums.append(total())
        assert sums[-1] == total()
    assert {value % 2 for value in sums} == {0.0}  # each input is dropped or doubled
    assert len(set(sums)) > 10
    # the standard deviation of the mean is sqrt(48 / 400) = 0.35
    assert abs(np.mean(sums) - 48) < 1.5


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
    assert program.factors_of(again) == program.factors_of(trained) != program.factors_of(other)
    for one, two in zip(other.adapters, trained.adapters, strict=True):
        one.load_state_dict(two.state_dict())
    batch = program.batch_of(4, 9)
    found = [p.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values for p in (trained, other)]
    assert np.array_equal(*found)
