"""The ranks of a training run that is resumed, started by scenarios/test_resume.py.

Arguments: SIZE MODEL ROOT [SOURCE ...].
Without sources, run four updates of every scenario. Write the state after the second update to
<root>/<size>/<scenario>/state, and the final weights to straight.npz beside it.
Each source is a number of ranks: resume from the state that they wrote, and write the final weights
to from-<source>-on-<size>.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_program import COSINE, batch_of, in_ranks, join_ranks

from rl_protocol.support.rendezvous import RendezvousListener
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, FsdpConfig, LoraConfig
from rl_trainer.algorithms.batching import split_over_ranks
from rl_trainer.backends.parallel_strategy import FsdpStrategy, full_tensor
from rl_trainer.backends.token_batch import lengths_of
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import World
from rl_trainer.config.optim import Schedule

SCENARIOS = {
    "full": None,
    "lora": LoraConfig(rank=4, alpha=8),
    "dropout": LoraConfig(rank=4, alpha=8, dropout=0.3),
    "critic": None,
    "average": None,
}
UPDATES = 4


def build(scenario: str, path: Path, world: World):
    strategy = FsdpStrategy(FsdpConfig(device="cpu"), world)
    if scenario == "critic":
        return TorchCriticBackend(
            path, CriticConfig(optim=COSINE, ppo_mini_batch_size=4), rollout_n=1, seed=0, strategy=strategy
        )
    config = ActorConfig(optim=COSINE, ppo_mini_batch_size=4, use_kl_loss=True)
    options = PolicyOptions(teacher_ema=0.75 if scenario == "average" else 0.0)
    return TorchPolicyBackend(path, config, lora=SCENARIOS[scenario], seed=0, strategy=strategy, options=options)


def train(model, base, world: World, first: int, last: int) -> None:
    schedule = Schedule(epochs=1, mini_batch_rows=4, seed=0)
    for update in range(first, last):
        data = batch_of(base, 11, update)
        share = split_over_ranks(lengths_of(data), schedule, update, world.size)[world.rank]
        more = {} if isinstance(model, TorchCriticBackend) else {"temperature": 1.0}
        model.update_local(data.select_rows(list(share.rows)), share.mini_batches, **more)


def weights(model) -> dict[str, np.ndarray]:
    if isinstance(model, TorchCriticBackend):
        return {name: full_tensor(tensor).numpy().copy() for name, tensor in model._model.state_dict().items()}
    if model._average is not None:
        return {name: full_tensor(tensor).numpy().copy() for name, tensor in model._average.tensors.items()}
    return {weight.name: from_weight(weight).numpy().copy() for weight in model.named_weights()}


def rank_main(rank: int, size: int, path: Path, root: Path, sources: list[int], listener: RendezvousListener) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(17 * len(sources))
    world = join_ranks(rank, size, listener)
    base = TorchPolicyBackend(path, None)
    for scenario in SCENARIOS:
        results = dict[str, dict[str, np.ndarray]]()
        if not sources:
            model, folder = build(scenario, path, world), root / str(size) / scenario / "state"
            folder.mkdir(parents=True, exist_ok=True)
            train(model, base, world, 0, UPDATES // 2)
            write = model.snapshot()
            train(model, base, world, UPDATES // 2, UPDATES)
            write(folder)  # must write the state at the time of the snapshot
            results["straight"] = weights(model)
        for source in sources:
            model = build(scenario, path, world)
            model.restore(root / str(source) / scenario / "state")
            train(model, base, world, UPDATES // 2, UPDATES)
            results[f"from-{source}-on-{size}"] = weights(model)
        for name, found in results.items():
            if not rank:
                np.savez(root / str(size) / scenario / f"{name}.npz", **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    in_ranks(
        ranks,
        rank_main,
        ranks,
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        [int(text) for text in sys.argv[4:]],
        RendezvousListener(),
    )
