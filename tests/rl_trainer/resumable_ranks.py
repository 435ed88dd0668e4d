"""One rank of a training run, started by test_checkpoints.py as a process of its own: rank size store model root [sizes to go on from].

Without sizes: four updates of every scenario, with the state written to <root>/<size>/<scenario>/state after the second, and what was learnt
to <root>/<size>/<scenario>/straight.npz. With sizes: goes on from the state that so many ranks wrote, to from-<size>-on-<own size>.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_program import COSINE, batch_of

from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, FsdpConfig, LoraConfig
from rl_trainer.algorithms.batching import Schedule, share_out
from rl_trainer.backends.engine import FsdpEngine, whole
from rl_trainer.backends.tokens import lengths_of
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.backends.world import World, join_world

SCENARIOS = {
    "full": None,
    "lora": LoraConfig(rank=4, alpha=8),
    "dropout": LoraConfig(rank=4, alpha=8, dropout=0.3),
    "critic": None,
}
UPDATES = 4


def build(scenario: str, path: Path, world: World):
    engine = FsdpEngine(FsdpConfig(device="cpu"), world)
    if scenario == "critic":
        return TorchCriticBackend(
            path, CriticConfig(optim=COSINE, ppo_mini_batch_size=4), rollout_n=1, seed=0, engine=engine
        )
    config = ActorConfig(optim=COSINE, ppo_mini_batch_size=4, use_kl_loss=True)
    return TorchPolicyBackend(path, config, lora=SCENARIOS[scenario], seed=0, engine=engine)


def train(model, base, world: World, first: int, last: int) -> None:
    schedule = Schedule(epochs=1, mini_batch_rows=4, seed=0)
    for update in range(first, last):
        data = batch_of(base, 11, update)
        share = share_out(lengths_of(data), schedule, update, world.size)[world.rank]
        more = {} if isinstance(model, TorchCriticBackend) else {"temperature": 1.0}
        model.update_share(data.select_rows(list(share.rows)), share.mini_batches, **more)


def weights(model) -> dict[str, np.ndarray]:
    if isinstance(model, TorchCriticBackend):
        return {name: whole(tensor).numpy().copy() for name, tensor in model._model.state_dict().items()}
    return {weight.name: from_weight(weight).numpy().copy() for weight in model.named_weights()}


def main() -> None:
    rank, size, store, path, root = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:6])
    sources = [int(text) for text in sys.argv[6:]]
    torch.set_num_threads(1)
    torch.manual_seed(17 * len(sources))
    world = join_world(rank, size, store=store, device="cpu", timeout_s=120)
    base = TorchPolicyBackend(path, None)
    for scenario in SCENARIOS:
        results = dict[str, dict[str, np.ndarray]]()
        if not sources:
            model, folder = build(scenario, path, world), root / str(size) / scenario / "state"
            folder.mkdir(parents=True, exist_ok=True)
            train(model, base, world, 0, UPDATES // 2)
            write = model.snapshot()
            train(model, base, world, UPDATES // 2, UPDATES)
            write(folder)  # what is written late is what was copied early
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
    main()
