"""Gradients of adapters equal those of peft."""

from __future__ import annotations

import pytest
from relative import apart


def with_masks_of(policy, model, batch, pass_name):
    """Give a peft model the dropout masks that the policy uses in a pass; return it in train mode.

    All rows are one micro-batch. Masks depend on seed, pass and layer, over [places, rows, inputs].
    """
    import zlib

    import torch

    from rl_megatron_peft.base_model.naming import HFModule

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
    """First trains A, B and magnitudes: initially B A is 0, which would hide wrong gradients."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from rl_megatron_peft.backend.policy import MiniBatchCounts
    from rl_megatron_peft.backend.train.settings import AdamConfig
    from rl_protocol.padding import pad_sequences

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
    tokens = pad_sequences(batch.ragged("prompts"), batch.ragged("responses"))
    log_p = torch.log_softmax(model(tokens.ids).logits[tokens.row, tokens.place, :15], -1)
    taken = log_p.gather(-1, tokens.targets[:, None])[:, 0]
    counts = MiniBatchCounts(tokens=int(batch.ragged("response_mask").values.sum()), sequences=6)
    loss = program.loss(taken, -(log_p.exp() * log_p).sum(-1), batch, counts)[0]
    assert apart(reported["actor/loss"], loss, taken) < 1e-5
    loss.backward()
    theirs = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = {factor.key: factor.parameter.grad for lora in policy.adapters for factor in lora.factors()}
    for name, want in theirs.items():
        key = name.removesuffix(".default.weight")
        if key in ours:  # a shared A gets the sum of their gradients
            assert apart(ours.pop(key), want) < 1e-4, key
    assert all(".linear_" in key and key.endswith(".lora_A") for key in ours)
    assert bool(ours) == (kind == "fused-dora")
