"""Compare our mapping with Megatron-Bridge's on the same ranks.

Usage: bridge_program.py MODELS OUT. Every rank of every layout writes its comparisons to
<out>/<layout>-<family>-<rank>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from megatron_program import batch_of, policy_of, through_layouts
from ranks import in_ranks

LAYOUTS = {1: {"one": (1, 1)}, 2: {"tp2": (2, 1), "pp2": (1, 2)}}
FAMILIES = ("llama", "qwen2", "qwen3")


def exported(policy):
    """Return name -> bytes of every exported weight."""
    return {weight.name: bytes(weight.data) for weight in policy.named_weights()}


def compare(path, ranks):
    """Compare parameters after loading, and exported weights before and after training."""
    import torch
    from safetensors.torch import load_file

    from rl_megatron_peft.backend.model.gpt import base_parameters
    from rl_megatron_peft.backend.model.megatron_bridge import BridgeMapping
    from rl_megatron_peft.backend.model.weight_mapping import OwnMapping, best_mapping

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
    from rl_megatron_peft.backend.model.megatron_bridge import bridge_problem

    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    if problem := bridge_problem(ModelShape.read(models / "llama"), Layout()):
        sys.exit(problem)
    for size in LAYOUTS:
        in_ranks(size, rank_main, size, models, out)


if __name__ == "__main__":
    main()
