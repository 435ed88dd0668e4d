"""Gather sharded tensors on three ranks, started by scenarios/test_full_tensors.py.

Arguments: OUT. Writes <out>/<rank>.json: whether each gathered tensor equals the one that was
sharded, and how many collectives of `full_tensors` that took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from ranks import in_ranks, join_ranks

from rl_protocol.support.rendezvous import RendezvousListener
from rl_trainer.backends import parallel_strategy
from rl_trainer.backends.parallel_strategy import full_tensors

RANKS = 3
WHOLE = {
    "rows_left_over": torch.arange(7.0 * 3).reshape(7, 3),  # 3, 3 and 1 rows
    "ranks_without_rows": torch.arange(4.0).reshape(1, 4),
    "two_bytes": torch.arange(25).reshape(5, 5).to(torch.bfloat16),
    "whole_numbers": torch.arange(4),
    "large": torch.arange(300.0).reshape(100, 3),  # 1,200 bytes, more than a group has here
    "after": torch.arange(6.0),
}


def rank_main(rank: int, out: Path, listener: RendezvousListener) -> None:
    torch.set_num_threads(1)
    join_ranks(rank, RANKS, listener)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in WHOLE.items()}
    pair = (distribute_tensor(WHOLE["rows_left_over"], mesh, [Replicate()]), WHOLE["whole_numbers"])
    calls, plain = [], dist.all_gather

    def counted(*arguments, **options):
        calls.append(arguments)
        return plain(*arguments, **options)

    parallel_strategy._GROUP_BYTES = 1000
    dist.all_gather = counted
    items = [*((name, (tensor,)) for name, tensor in sharded.items()), ("pair", (sharded["after"], *pair))]
    found = list(full_tensors(iter(items)))
    want = [*((name, [tensor]) for name, tensor in WHOLE.items())]
    want += [("pair", [WHOLE["after"], WHOLE["rows_left_over"], WHOLE["whole_numbers"]])]
    equal = {
        name: name == key and all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))
        for (name, tensors), (key, wanted) in zip(found, want, strict=True)
    }
    (out / f"{rank}.json").write_text(json.dumps({"equal": equal, "collectives": len(calls)}))


if __name__ == "__main__":
    in_ranks(RANKS, rank_main, Path(sys.argv[1]), RendezvousListener())
