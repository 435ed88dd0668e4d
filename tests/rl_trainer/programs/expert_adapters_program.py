"""LoRA on experts over two ranks, started by scenarios/test_sharded_expert_adapters.py.

Arguments: MODEL OUT. Both ranks run the updates of every scenario together; then rank 1 runs them
in plain torch. Results are those of rank_program.py: <out>/{two/0,two/1,plain}/<scenario>.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
import rank_program
from ranks import in_ranks, join_ranks

from rl_protocol.support.rendezvous import RendezvousListener
from rl_trainer import LoraConfig
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.backends.world import World

SCENARIOS = {
    "all": {
        "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3},
        "lora": LoraConfig(rank=3, alpha=6),
    },
    "bf16": {
        "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3},
        "fsdp": {"param_dtype": "bfloat16", **rank_program.RECOMPUTED},
        "lora": LoraConfig(rank=3, alpha=6),
    },
    "packed_recomputed": {
        "actor": rank_program.JOINED,
        "fsdp": rank_program.RECOMPUTED,
        "lora": LoraConfig(rank=3, alpha=6, target_modules=("down_proj",)),
    },
    "unsharded_after_forward": {
        "actor": {"ppo_mini_batch_size": 4},
        "fsdp": {"reshard_after_forward": False},
        "lora": LoraConfig(rank=3, alpha=6, use_rslora=True, target_modules=("q_proj", "gate_proj", "up_proj")),
    },
}


def rank_main(rank: int, path: Path, out: Path, listener: RendezvousListener) -> None:
    torch.set_num_threads(1)
    rank_program.SCENARIOS, rank_program.UPDATES = SCENARIOS, 3
    base = TorchPolicyBackend(path, None)
    world = join_ranks(rank, 2, listener)
    rank_program.run_all(path, base, world, out / "two" / str(rank))
    dist.destroy_process_group()
    if rank:
        rank_program.run_all(path, base, World(), out / "plain", plain=True)


if __name__ == "__main__":
    in_ranks(2, rank_main, Path(sys.argv[1]), Path(sys.argv[2]), RendezvousListener())
