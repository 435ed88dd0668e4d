"""FSDP2 over gloo: two ranks, one rank and plain torch learn the same from the same batches.

Layers that are computed again in the backward pass change nothing, also with plain torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from relative import apart
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, ConfigError
from rl_trainer import ActorConfig, CriticConfig, FsdpConfig, LoraConfig, OptimConfig
from rl_trainer.backends.parallel_strategy import FsdpStrategy, PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.backends.world import World
from rl_trainer.config.backends import TorchConfig

PROGRAM = Path(__file__).parents[1] / "programs" / "rank_program.py"
EXACT = (
    "full",
    "seq_mean",
    "idle",
    "packed_recomputed",
    "lora",
    "lora_packed_recomputed",
    "critic",
    "onednn",
    "critic_packed_recomputed",
    "critic_lora",
)


@pytest.fixture(scope="module")
def runs(model_path, tmp_path_factory):
    """Folder with the results of rank_program.py: one/0, two/0, two/1 and plain."""
    out = tmp_path_factory.mktemp("fsdp")
    with (out / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(PROGRAM), str(model_path), str(out)], stdout=log, stderr=log)
    try:
        code = process.wait(timeout=600)
    finally:
        process.kill()
    assert code == 0, (out / "log").read_text()[-3000:]
    return out


def load(folder, scenario):
    """Merge the results of all ranks; weights and metrics must be the same on each."""
    merged = {}
    for rank in sorted(p for p in folder.iterdir() if p.name.isdigit()):
        found = dict(np.load(rank / f"{scenario}.npz"))
        for name in merged.keys() & found.keys():
            assert np.array_equal(merged[name], found[name]), f"the ranks differ in {name}"
        merged |= found
    return merged


@pytest.mark.slow
@pytest.mark.parametrize("scenario", EXACT)
def test_two_ranks_equal_one_after_five_steps(runs, scenario):
    one, two = load(runs / "one", scenario), load(runs / "two", scenario)
    plain = dict(np.load(runs / "plain" / f"{scenario}.npz"))
    assert plain.keys() == one.keys() == two.keys()
    assert sum(name.startswith("row/") for name in two) >= 5
    for name, value in one.items():
        assert np.abs(two[name] - value).max() <= 1e-5 * max(1.0, np.abs(value).max()), name
        assert np.abs(plain[name] - value).max() <= 1e-5 * max(1.0, np.abs(value).max()), name
    rates = [float(one[name]) for name in one if name.endswith("/lr")]
    assert len(rates) == 5
    assert rates[-1] < max(rates)  # the schedule has lowered the rate


@pytest.mark.slow
def test_they_have_learned_something(runs):
    first, last = (load(runs / "two", "full")[f"metric/{i}/actor/ppo_kl"] for i in (0, 4))
    assert first != last


@pytest.mark.slow
def test_the_adapter_off_is_the_base_on_every_rank(runs, model_path):
    found = load(runs / "two", "lora")
    names = [name.rpartition("/")[2] for name in found if name.startswith("row/reference/")]
    assert any(np.abs(found[f"row/reference/{i}"] - found[f"row/log_probs/{i}"]).max() > 1e-3 for i in names)
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    adapted = {name.removeprefix("weight/") for name in found if name.startswith("weight/")}
    assert adapted == base.keys()
    for name, weight in base.items():
        if "proj" not in name or name.endswith("bias"):
            assert np.array_equal(found[f"weight/{name}"], weight.numpy()), name


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "exact"), [("bf16", "seq_mean"), ("bf16_lora", "lora")])
def test_compute_in_bf16_keeps_master_weights_in_float32(runs, scenario, exact):
    half, close = load(runs / "two", scenario), load(runs / "two", exact)
    one = load(runs / "one", scenario)
    weights = {name: value for name, value in half.items() if name.startswith("weight/")}
    assert {value.dtype for value in weights.values()} == {np.dtype("float32")}
    trained = [value for name, value in weights.items() if scenario == "bf16" or "proj.weight" in name]
    beyond_bf16 = [
        float((torch.from_numpy(value).bfloat16().float() != torch.from_numpy(value)).float().mean())
        for value in trained
    ]
    assert min(beyond_bf16) > 0.5  # updates smaller than a bf16 step are kept
    for name, value in weights.items():
        assert np.abs(value - close[name]).max() < 0.02, name
        assert np.abs(value - one[name]).max() < 0.02, name


@pytest.mark.slow
def test_ranks_read_their_rows_of_a_reference_in_bf16(runs):
    two, one = load(runs / "two", "bf16"), load(runs / "one", "bf16")
    names = [name for name in two if name.startswith("row/frozen/")]
    assert len(names) == 7
    for name in names:
        assert apart(two[name], one[name]) < 0.02, name
        assert 1e-5 < apart(two[name], two[name.replace("frozen", "exact")]) < 0.05, name


@pytest.mark.slow
def test_the_checkpoint_of_two_ranks_loads(runs, model_path):
    found = load(runs / "two", "full")
    loaded = AutoModelForCausalLM.from_pretrained(runs / "two" / "0" / "checkpoint-full").state_dict()
    assert all(np.array_equal(found[f"weight/{name}"], weight.numpy()) for name, weight in loaded.items())
    base = AutoModelForCausalLM.from_pretrained(model_path)
    adapted = (
        peft.PeftModel.from_pretrained(base, runs / "two" / "0" / "checkpoint-lora").merge_and_unload().state_dict()
    )
    merged = load(runs / "two", "lora")
    assert all(apart(merged[f"weight/{name}"], weight) < 1e-6 for name, weight in adapted.items())


def test_offload_to_the_cpu_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"^cpu_offload must be false with device=cpu"):
        FsdpConfig(device="cpu", cpu_offload=True)
    for config in (FsdpConfig, TorchConfig):
        with pytest.raises(ConfigError, match=r"^optimizer_offload must be false with device=cpu"):
            config(device="cpu", optimizer_offload=True)
    with pytest.raises(ConfigError, match=r"^optimizer_offload must be false with cpu_offload=true"):
        FsdpConfig(cpu_offload=True, optimizer_offload=True)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="where there is no GPU"):
            FsdpStrategy(FsdpConfig(cpu_offload=True), World()).prepare(torch.nn.Linear(1, 1), ())


PADDED = {"ppo_micro_batch_size": 4, "use_remove_padding": False}
PACKED = {"ppo_max_token_len": 30, "use_remove_padding": True}


def calls_of_layers(model):
    """A list that gets an entry for each forward pass of the first layer's attention."""
    calls = list[bool]()
    (first, *_) = [module for module in model.modules() if type(module).__name__ == "Qwen2Attention"]
    first.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


def kept_and_recomputed(dtype):
    return [PlainStrategy(TorchConfig(param_dtype=dtype, activation_checkpointing=again)) for again in (False, True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("passes", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, use_dora=True)], ids=["whole", "dora"])
def test_an_update_is_the_same_and_computes_each_layer_twice(model_path, training_batch, dtype, passes, lora):
    config = ActorConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=8, use_kl_loss=True, **passes)
    kept, again = (
        TorchPolicyBackend(model_path, config, lora=lora, strategy=strategy) for strategy in kept_and_recomputed(dtype)
    )
    data = training_batch(kept, rows=8)
    calls = [calls_of_layers(policy._model) for policy in (kept, again)]
    metrics = [[policy.update(data, temperature=1.0) for _ in range(3)] for policy in (kept, again)]
    assert metrics[0] == metrics[1]
    for one, other in zip(kept._model.parameters(), again._model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    assert len(calls[1]) == 2 * len(calls[0]) > 0
    seen = len(calls[1])
    again.compute_log_probs(data, temperature=1.0)
    kept.compute_log_probs(data, temperature=1.0)
    assert len(calls[1]) - seen == len(calls[0]) - seen // 2 > 0  # without gradients, once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_computes_its_layers_again(model_path, training_batch, dtype):
    data = training_batch(TorchPolicyBackend(model_path, None), rows=8)
    columns = {"values": data.ragged("ref_log_prob"), "returns": data.ragged("advantages")}
    data = BatchData({**data.columns, **columns})
    config = CriticConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=8)
    kept, again = (
        TorchCriticBackend(model_path, config, rollout_n=1, seed=0, strategy=strategy)
        for strategy in kept_and_recomputed(dtype)
    )
    calls = [calls_of_layers(critic._model) for critic in (kept, again)]
    metrics = [[critic.update(data) for _ in range(3)] for critic in (kept, again)]
    assert metrics[0] == metrics[1]
    assert len(calls[1]) == 2 * len(calls[0]) > 0
