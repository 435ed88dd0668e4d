"""Where training waits for a GPU to read a value: each such place has a reason in HOST_READS.toml.

The models of the torch backends run on two stand-ins of a GPU, which note every read by the host:
`item()`, `float()` or a branch on a tensor, a copy to the CPU, and operations whose shape depends
on values. The fake GPU runs every loss and checkpoint, without backward passes; the stand-in device
computes, so that it runs backward passes, and generates as many tokens as a CPU does.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_gpu import GPU, FakeGpu
from host_reads import HostRead
from standin_device import STAND_IN, StandIn

from rl_protocol import BatchData, RaggedColumn
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config import ActorConfig, CriticConfig, OptimConfig, PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.config.backends import TorchConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.rollout.hf_engine import HFRolloutEngine

LISTED = Path(__file__).with_name("HOST_READS.toml")
OPTIM = OptimConfig(lr=1e-2)


def listed() -> dict[HostRead, str]:
    """The committed reads, with their reasons."""
    reads = tomllib.loads(LISTED.read_text(encoding="utf-8"))["read"]
    return {HostRead(read["where"], read["what"], read.get("through", "")): read["reason"] for read in reads}


def described(reads: set[HostRead]) -> str:
    return "\n".join(
        f'[[read]]\nwhere = "{read.where}"\nwhat = "{read.what}"\n'
        + (f'through = "{read.through}"\n' if read.through else "")
        + 'reason = ""\n'
        for read in sorted(reads)
    )


@pytest.fixture(scope="module")
def data(model_path, training_batch):
    """The columns of an update of any model."""
    batch = training_batch(TorchPolicyBackend(model_path, None))
    offsets, rng = batch.ragged("responses").offsets, np.random.default_rng(1)
    names = ("values", "returns", "rl_weights", "ce_weights", "ref_kl_weights")
    more = {name: rng.random(offsets[-1], np.float32) for name in names}
    chosen = RaggedColumn(rng.random(offsets[-1]) < 0.5, offsets, "bool")
    columns = {name: RaggedColumn(values, offsets, "float32") for name, values in more.items()}
    return BatchData({**batch.columns, "chosen_tokens": chosen, **columns})


def policy(path, *, lora=None, options=None, dtype="float32", packed=True, device=GPU, **settings):
    config = ActorConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=packed, **settings)
    strategy = PlainStrategy(TorchConfig(param_dtype=dtype), device)
    return TorchPolicyBackend(path, config, lora=lora, strategy=strategy, options=options or PolicyOptions())


def train(path, data, folder):
    """Everything that policies, critics and references do in a run, and in a checkpoint."""
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs=("token_k1",), rollout_rs_threshold=("0.1_8",))
    options = PolicyOptions(sum_pi_squared=True, correction=correction, top=3)
    plain = BatchData({name: column for name, column in data.columns.items() if not name.endswith("_weights")})
    for number, (lora, packed, dtype) in enumerate(
        [(None, True, "bfloat16"), (None, False, "float32"), (LoraConfig(rank=2, dropout=0.5), True, "float32")]
    ):
        trained = policy(path, lora=lora, options=options, dtype=dtype, packed=packed, use_kl_loss=True)
        trained.compute_log_probs(data, temperature=0.9)
        if lora is not None:
            trained.compute_reference_log_probs(data, temperature=0.9)
            list(trained.adapter_weights())
        trained.update(plain, temperature=0.9)
        list(trained.named_weights())
        trained.snapshot()
        trained.export()
        target = folder / f"{number}"
        target.mkdir()
        trained.snapshot()(target)
        trained.restore(target)
    mixed = policy(path, entropy_coeff=0.1, use_kl_loss=True)
    mixed.update(data, temperature=1.0)
    for name in POLICY_LOSSES.names():
        per_sequence = POLICY_LOSSES.get(name).per_sequence
        mode = "seq-mean-token-mean" if per_sequence else "token-mean"
        one = policy(path, policy_loss=PolicyLossConfig(loss_mode=name), loss_agg_mode=mode)
        one.update(plain, temperature=1.0)
    reference = policy(path, options=PolicyOptions(frozen=True, top=3))
    reference.compute_log_probs(data, temperature=1.0)
    train_critic(path, data, GPU)


def train_critic(path, data, device):
    config = CriticConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=True)
    critic = TorchCriticBackend(path, config, rollout_n=1, seed=0, strategy=PlainStrategy(TorchConfig(), device))
    critic.compute_values(data)
    critic.update(data)


def compute(path, data):
    """Training with backward passes, and a rollout whose rows end at different tokens."""
    trained = policy(path, device=STAND_IN, use_kl_loss=True)
    trained.compute_log_probs(data, temperature=1.0)
    trained.update(data, temperature=1.0)
    train_critic(path, data, STAND_IN)
    asked = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i % 5,) * (1 + i % 4)) for i in range(70)]
    asyncio.run(HFRolloutEngine(path, device=STAND_IN).generate(asked, SamplingParams(max_new_tokens=6)))


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
def test_every_read_from_the_gpu_has_a_reason(model_path, data, tmp_path):
    with FakeGpu() as gpu:
        train(model_path, data, tmp_path)
    with StandIn() as computing:
        compute(model_path, data)
    found, known = gpu.host_reads | computing.host_reads, listed()
    assert all(len(reason.split()) > 3 for reason in known.values())
    new, gone = found - known.keys(), known.keys() - found
    assert not new, (
        f"The host waits for the GPU in new places. Avoid them, or list them in {LISTED} with a reason:\n{described(new)}"
    )
    assert not gone, f"Remove from {LISTED} what is not read any more:\n{described(gone)}"


@pytest.mark.parametrize(("stand_in", "device"), [(FakeGpu, GPU), (StandIn, STAND_IN)], ids=["fake", "computing"])
def test_reads_of_each_kind_are_found(stand_in, device):
    with stand_in() as gpu:
        there = torch.ones(4, device=device)
        assert not gpu.host_reads
        there * 2 + there.sum()
        assert not gpu.host_reads
        for what, read in (
            ("scalar", lambda: there.sum().item()),
            ("scalar", lambda: float(there[0])),
            ("scalar", lambda: 1 if there.sum() > 2 else 0),
            ("copy", lambda: there.cpu()),
            ("copy", lambda: torch.zeros(4).copy_(there)),
            ("index by a mask", lambda: there[there > 0]),
        ):
            gpu.host_reads.clear()
            read()
            assert {one.what for one in gpu.host_reads} == {what}, what
