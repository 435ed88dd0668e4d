"""The memory of a process that has the model of one role, as the kernel counts it.

    python -m harness.role_memory MODEL ROLE LENGTH KEY=VALUE ...

The process makes the model of the role with the product's classes and uses it: three updates or
three passes of a reference. It prints its peak of resident memory and its speed as JSON. The role
`bare` is a plain PyTorch loop that makes the updates of an actor.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers.bare_grpo import token_log_probs
from transformers import AutoModelForCausalLM

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import BatchData, ragged
from rl_protocol.support.network_interface import LOOPBACK, NetworkInterface
from rl_protocol.support.rendezvous import Rendezvous
from rl_trainer.backends.parallel_strategy import FsdpStrategy, ParallelStrategy, PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import CPU, join_world
from rl_trainer.config import ActorConfig
from rl_trainer.config.backends import FsdpConfig, TorchConfig

STEPS = 3


def status(name: str) -> int:
    """A number of /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(name)


def strategy_of(config: AppConfig) -> ParallelStrategy:
    """Where the model is, as the workers of the app decide it."""
    if config.model_engine == "torch":
        return PlainStrategy(config.engine_as(TorchConfig), CPU)
    meeting = Rendezvous(
        rank=0, size=1, address=None, interface=NetworkInterface("lo", LOOPBACK), chosen=False, listener=None
    )
    world = join_world(meeting, device=CPU, timeout_s=60, join_timeout_s=60)
    return FsdpStrategy(config.engine_as(FsdpConfig), world)


def batch_of(rows: int, length: int, vocabulary: int) -> BatchData:
    """Rows of a prompt and a response of half the length each, and every column of an update."""
    rng, half = np.random.default_rng(0), length // 2
    tokens = [rng.integers(1, vocabulary, half).tolist() for _ in range(2 * rows)]
    ones = ragged([np.ones(half)] * rows, "float32")
    return BatchData(
        {
            "prompts": ragged(tokens[:rows], "int64"),
            "responses": ragged(tokens[rows:], "int64"),
            "response_mask": ragged([[True] * half] * rows, "bool"),
            **dict.fromkeys(("old_log_probs", "advantages", "ref_log_prob", "values", "returns"), ones),
        }
    )


def step_of(model: Path, role: str, config: AppConfig, length: int) -> Callable[[], object]:
    """Make the model of a role; returns a call that uses it once.

    Raises:
        ValueError: the role has no model.
    """
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    n = config.rollout.n
    rows = config.actor.ppo_mini_batch_size * n
    batch = batch_of(rows, length, vocabulary)
    torch.manual_seed(0)
    match role:
        case "actor":
            policy = TorchPolicyBackend(model, config.actor, rollout_n=n, strategy=strategy_of(config))
            return lambda: policy.update(batch, temperature=1.0)
        case "critic":
            critic = TorchCriticBackend(model, config.critic, rollout_n=n, seed=0, strategy=strategy_of(config))
            return lambda: critic.update(batch)
        case "ref":
            options = PolicyOptions(frozen=True)
            reference = TorchPolicyBackend(model, config.actor, strategy=strategy_of(config), options=options)
            return lambda: reference.compute_log_probs(batch, temperature=1.0)
        case "bare":
            return bare_loop(model, config.actor, torch.randint(1, vocabulary, (rows, length)))
        case _:
            raise ValueError(f"role must be actor, critic, ref or bare; got {role!r}")


def bare_loop(path: Path, config: ActorConfig, ids: torch.Tensor) -> Callable[[], object]:
    """PPO's clipped loss on the second half of `ids` [rows, length], by plain PyTorch.

    Weights are float32, computation is in bfloat16 by autocast, and activations are recomputed.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers recomputes nothing in evaluation mode
    adam = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    old, advantage, half = 1.0, 1.0, ids.shape[1] // 2

    def step() -> None:
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = token_log_probs(model, ids, half, 1.0).float()
        ratio = (log_probs - old).exp()
        (-torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        adam.step()

    return step


class PeakMemory:
    """The most resident memory of this process since `reset`, as the kernel counts it."""

    def __init__(self) -> None:
        self._before = status("VmRSS")
        self.reset()

    def reset(self) -> None:
        """Start again from what is resident now."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @property
    def added(self) -> int:
        """The peak minus what was resident when this was made, bytes."""
        return status("VmHWM") - self._before


def main() -> None:
    """Print what the model of a role adds to the process at most, and the seconds of a step.

    Until the first step has ended, pages of the model's file are resident too, which the kernel can
    drop.
    """
    model, role, length, *settings = sys.argv[1:]
    config, memory = load_config(settings), PeakMemory()
    step, taken = step_of(Path(model), role, config, int(length)), list[float]()
    step()
    first = memory.added
    memory.reset()
    for _ in range(STEPS - 1):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    print(json.dumps({"first": first, "later": memory.added, "seconds": min(taken)}))


if __name__ == "__main__":
    main()
