"""Our mapping and Megatron-Bridge's on the same ranks, started by the tests as a process of its own: models out

Every rank of every layout writes <out>/<layout>-<family>-<rank>.json: what is the same, bit for bit, under both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from megatron_program import batch_of, in_ranks, policy_of, through_layouts

LAYOUTS = {1: {"one": (1, 1)}, 2: {"tp2": (2, 1), "pp2": (1, 2)}}
FAMILIES = ("llama", "qwen2", "qwen3")


def exported(policy):
    """Name -> bytes of every weight that leaves the policy."""
    return {weight.name: bytes(weight.data) for weight in policy.named_weights()}


def compare(path, ranks):
    """Of one family: parameters after loading, weights out before and after training, and their names."""
    import torch
    from safetensors.torch import load_file

    from rl_megatron_peft.backend.bridge import BridgeMapping
    from rl_megatron_peft.backend.mapping import OwnMapping, best_mapping
    from rl_megatron_peft.backend.model import base_parameters

    own, bridged = (policy_of(path, ranks, "fused", mapping=mapping) for mapping in (OwnMapping, BridgeMapping))
    ours, theirs = (dict(base_parameters(policy.model, policy.shape, ranks)) for policy in (own, bridged))
    fresh, read = exported(bridged), load_file(path / "model.safetensors")
    found = {
        "best": type(best_mapping(path, own.shape, ranks)) is BridgeMapping,
        "loaded": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours),
        "unchanged": fresh == {name: tensor.numpy().tobytes() for name, tensor in read.items()},
        "fresh": fresh == exported(own),
    }
    for policy in (own, bridged):
        policy.update(batch_of(6, 0), temperature=1.0)
    trained = exported(bridged)
    return found | {"names": trained.keys() == fresh.keys(), "trained": trained == exported(own) != fresh}


def rank_main(rank, size, models, out):
    for name, ranks in through_layouts(LAYOUTS[size], rank, size, out / f"store-{size}"):
        for family in FAMILIES:
            (out / f"{name}-{family}-{rank}.json").write_text(json.dumps(compare(models / family, ranks)))


def main():
    from rl_megatron_peft import Layout, ModelShape
    from rl_megatron_peft.backend.bridge import bridge_problem

    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    if problem := bridge_problem(ModelShape.read(models / "llama"), Layout()):  # and it is imported, once for all ranks
        sys.exit(problem)
    for size in LAYOUTS:
        in_ranks(size, rank_main, size, models, out)


if __name__ == "__main__":
    main()
