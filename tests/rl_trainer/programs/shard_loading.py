"""Load models on two ranks by the rows of each and whole, started by backends/test_loading.py.

Arguments: OUT FOLDER... Writes <out>/<rank>.json: folder/kind -> what was found (see `found`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from ranks import in_ranks, join_ranks

from rl_protocol.support.rendezvous import RendezvousListener
from rl_trainer import ActorConfig, CriticConfig, FsdpConfig, LoraConfig, OptimConfig
from rl_trainer.backends.loading import UnreadWeights
from rl_trainer.backends.parallel_strategy import FsdpStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend

KINDS = {
    "full": (TorchPolicyBackend, None),
    "lora": (TorchPolicyBackend, LoraConfig(rank=2)),
    "dora": (TorchPolicyBackend, LoraConfig(rank=2, use_dora=True)),
    "critic": (TorchCriticBackend, None),
    "critic_lora": (TorchCriticBackend, LoraConfig(rank=2)),
}


class WholeStrategy(FsdpStrategy):
    """Reads all weights on each rank."""

    def load(self, path, *, packed, whole=False, frozen=False):
        del whole
        return super().load(path, packed=packed, whole=True, frozen=frozen)


def tensors(backend) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter and buffer, tied ones under each name."""
    model = backend._model
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in named}


def anonymous() -> int:
    """Memory of this process that no file backs, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def found(path: Path, kind: str, world) -> dict[str, object]:
    """Whether the parts are equal, and by rows the bytes read and the memory taken."""
    backend, lora = KINDS[kind]
    config = ActorConfig(optim=OptimConfig()) if backend is TorchPolicyBackend else CriticConfig(optim=OptimConfig())
    read, memory, before = [], [], anonymous()
    plain = UnreadWeights.read

    def counted(self, world):
        memory.append(anonymous() - before)
        read.append(plain(self, world))
        memory.append(anonymous() - before)
        return read[-1]

    UnreadWeights.read = counted
    made = [
        backend(path, config, lora=lora, rollout_n=1, seed=3, strategy=strategy(FsdpConfig(device="cpu"), world))
        for strategy in (FsdpStrategy, WholeStrategy)
    ]
    UnreadWeights.read = plain
    ours, theirs = map(tensors, made)
    tied = [len(set(map(id, one._model.parameters()))) for one in made]
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return {"equal": equal and tied[0] == tied[1], "read": read, "memory": memory}


def rank_main(rank: int, out: Path, folders: list[Path], listener: RendezvousListener) -> None:
    torch.set_num_threads(1)
    world = join_ranks(rank, 2, listener)
    results = {
        f"{path.name}/{kind}": found(path, kind, world)
        for path in folders
        for kind in (KINDS if path.name != "large" else ["full"])
    }
    (out / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    in_ranks(2, rank_main, Path(sys.argv[1]), list(map(Path, sys.argv[2:])), RendezvousListener())
