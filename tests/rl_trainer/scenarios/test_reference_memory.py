"""A reference on the CPU keeps no memory of the blocks that FSDP2 has gathered."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

AS_A_WORKER = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc keeps what is freed, as in the workers of apps/ppo."""
PROGRAM = """
import sys
from pathlib import Path

import torch

from rl_protocol import BatchData, ragged
from rl_protocol.support.network_interface import LOOPBACK, NetworkInterface
from rl_protocol.support.rendezvous import Rendezvous
from rl_trainer import ActorConfig, FsdpConfig
from rl_trainer.backends.parallel_strategy import FsdpStrategy
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import CPU, join_world


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


lo = NetworkInterface("lo", LOOPBACK)
meeting = Rendezvous(rank=0, size=1, address=None, interface=lo, chosen=False, listener=None)
world = join_world(meeting, device=CPU, timeout_s=60, join_timeout_s=60)
strategy = FsdpStrategy(FsdpConfig(device="cpu", param_dtype="bfloat16"), world)
torch.zeros(64, 64).to(torch.bfloat16) @ torch.zeros(64, 64).to(torch.bfloat16)
before = resident()
reference = TorchPolicyBackend(sys.argv[1], ActorConfig(), strategy=strategy, options=PolicyOptions(frozen=True))
tokens = ragged([[1, 2, 3, 4]] * 2, "int64")
batch = BatchData({"prompts": tokens, "responses": tokens, "response_mask": ragged([[True] * 4] * 2, "bool")})
for _ in range(2):
    reference.compute_log_probs(batch, temperature=1.0)
print(resident() - before)
"""


@pytest.mark.slow
def test_a_reference_with_fsdp_keeps_little_beside_its_weights(tmp_path):
    """Without returning freed memory it kept two to three times the bytes of its weights."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=10,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=os.environ | AS_A_WORKER,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = 2 * sum(weight.numel() for weight in model.parameters())
    assert weights > 100 << 20
    assert int(done.stdout.splitlines()[-1]) < 1.6 * weights
