"""Train a model with experts on Megatron-Core over gloo: experts_program.py MODEL OUT.

Forks the ranks of each world after all imports. Results go to <out>/<layout>.npz and to the folder
<out>/<layout>/.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
from megatron_program import batch_of, bytes_of, logits_of, policy_of, steps_of
from ranks import in_ranks

WORLDS = {
    1: {"one": {}},
    2: {"ep2": {"expert": 2}, "sp2": {"tensor": 2, "sequence_parallel": True}},
    4: {"ep2pp2": {"expert": 2, "pipeline": 2}, "ep2dp4": {"expert": 2}},
}
BEFORE = {"ep2": "one", "sp2": "ep2", "ep2pp2": "one", "ep2dp4": "ep2"}
"""Layout -> the layout whose state it continues from."""
WRITTEN = ("one", "ep2")
"""Layouts that also use Megatron's writer, which is slow."""


def adam():
    """Settings with which a few steps change a model clearly."""
    from rl_megatron_peft.backend.train.settings import AdamConfig

    return AdamConfig(lr=1e-2, grad_clip=0.5)


def routed_batch():
    """Rows whose tokens have experts that no router chose; the third has none."""
    import numpy as np

    from rl_protocol import BatchData, pack_arrays
    from rl_protocol.rl_columns import ROUTED
    from rl_protocol.routed_tokens import computed_lengths

    batch, rng = batch_of(5, 99), np.random.default_rng(0)
    rows = [
        [
            rng.permuted(np.tile(np.arange(4, dtype=np.int16), (tokens, 2, 1)), axis=2)[:, :, :2]
            if row != 2
            else np.zeros((tokens, 0, 0), np.int16)
        ]
        for row, tokens in enumerate(computed_lengths(batch))
    ]
    return BatchData({**batch.columns, **pack_arrays(ROUTED, rows, ndim=3, dtype="int16")})


def few_rows(policy):
    """Update on one row, which only the first replica has."""
    own = batch_of(1, 7) if policy.ranks.data == 0 else batch_of(1, 7).select_rows([])
    return policy.update_local(own, [[0] if policy.ranks.data == 0 else []], temperature=1.0)


def recorded(model, ranks):
    """The experts that passes over two rows record: those of the routers, and those given to some
    rows.
    """
    from rl_protocol.rl_columns import ROUTED

    policy = policy_of(model, ranks, "whole", records_experts=True, forward_rows=2)
    batches = {"recorded": batch_of(5, 99), "recorded_given": routed_batch()}
    found = {name: policy.compute_log_probs(batch, temperature=1.0) for name, batch in batches.items()}
    return {name: columns.ragged(ROUTED).values for name, columns in found.items()}


def values_of_state(policy):
    """Trained values and moments of this rank in one array."""
    import numpy as np

    return np.concatenate(
        [part.numpy().ravel().copy() for _, parts in policy.optimizer.state() for part in parts.values()]
    )


def train(model, out, ranks, keep):
    """Train all weights; save what the tests compare."""
    import numpy as np

    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
    from rl_protocol.torch import from_weight

    policy = policy_of(model, ranks, "whole", adam=adam())
    found = {"base": logits_of(policy).numpy()}
    found["replayed"] = policy.compute_log_probs(routed_batch(), temperature=1.0).ragged("log_probs").values
    found |= recorded(model, ranks)
    exported = {weight.name: from_weight(weight).clone().numpy() for weight in policy.named_weights()}
    steps_of(policy, 0, 2)
    out.mkdir(exist_ok=True)
    policy.snapshot()(out)
    if out.name in WRITTEN:
        save_checkpoint(policy, out / "resume")
    found["norms"] = steps_of(policy, 2, 4)["actor/grad_norm"] + [few_rows(policy)["actor/grad_norm"]]
    found["trained"] = logits_of(policy).numpy()
    found["log_probs"] = policy.compute_log_probs(batch_of(7, 3), temperature=0.7).ragged("log_probs").values
    policy.save_pretrained(out / "model")
    before = out.parent / BEFORE.get(out.name, out.name)
    again = policy_of(model, ranks, "whole", adam=adam())
    if out.name in WRITTEN:
        load_checkpoint(again, before / "resume")
        found["resumed"] = values_of_state(again)
    again.restore(before)
    found["restored"] = values_of_state(again)
    steps_of(again, 2, 4)
    few_rows(again)
    found["later"] = logits_of(again).numpy()
    found["bytes"] = bytes_of(policy)
    if keep:
        np.savez(out.with_suffix(".npz"), **found)
        np.savez(out.parent / f"{out.name}-weights.npz", **exported)


def adapted_policy(model, ranks):
    """A policy with adapters of the attention and of the experts."""
    from rl_megatron_peft import LoraConfig

    return policy_of(model, ranks, "canonical", lora=LoraConfig(rank=3, alpha=6), adam=adam())


def first_moments(policy):
    """AdamW's first moments of the adapter by PEFT's names, on every rank."""
    import torch

    from rl_protocol.torch import from_weight

    trained = [one.parameter for one in policy.optimizer.trained]
    kept = [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(policy.optimizer.adam.state[parameter]["exp_avg"])
        found = {weight.name: from_weight(weight).clone().numpy() for weight in policy.adapter_weights()}
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)
    return found


def adapt(model, out, ranks, keep):
    """Train adapters from those in the folder `start`; save what the tests compare."""
    import numpy as np

    from rl_megatron_peft.backend.lora.attach import adapters_off, merged
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
    from rl_protocol.torch import from_weight

    policy = adapted_policy(model, ranks)
    found = {"fresh": logits_of(policy).numpy()}
    policy.load_adapter(out.parent / "start")
    found["start"] = logits_of(policy).numpy()
    with adapters_off(policy.adapters):
        found["off"] = logits_of(policy).numpy()
    with merged(policy.model):
        found["merged"] = logits_of(policy).numpy()
    exported = {weight.name: from_weight(weight).clone().numpy() for weight in policy.named_weights()}
    share = (policy.ranks.data, policy.ranks.replicas)
    found["first_norm"] = policy.update(batch_of(7, 0, share), temperature=1.0)["actor/grad_norm"]
    moments = first_moments(policy)
    steps_of(policy, 1, 2)
    (out / "adapting").mkdir(exist_ok=True)
    policy.snapshot()(out / "adapting")
    if out.name in WRITTEN:
        save_checkpoint(policy, out / "adapting-resume")
    found["norms"] = steps_of(policy, 2, 4)["actor/grad_norm"] + [few_rows(policy)["actor/grad_norm"]]
    policy.save_pretrained(out / "adapter")
    found["adapted"] = logits_of(policy).numpy()
    before, again = out.parent / BEFORE.get(out.name, out.name), adapted_policy(model, ranks)
    if out.name in WRITTEN:
        load_checkpoint(again, before / "adapting-resume")
        found["resumed"] = values_of_state(again)
    again.restore(before / "adapting")
    found["restored"] = values_of_state(again)
    steps_of(again, 2, 4)
    few_rows(again)
    found["later"] = logits_of(again).numpy()
    if keep:
        np.savez(out.parent / f"{out.name}-adapted.npz", **found)
        np.savez(out.parent / f"{out.name}-moments.npz", **moments)
        np.savez(out.parent / f"{out.name}-merged.npz", **exported)


def rank_main(rank, size, model, out):
    import datetime

    import torch
    import torch.distributed as dist

    from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
    from rl_megatron_peft.base_model.layout import Layout

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/{size}-store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    for name, layout in WORLDS[size].items():
        ranks = open_ranks(Layout(**layout))
        train(model, out / name, ranks, keep=rank == 0)
        adapt(model, out / name, ranks, keep=rank == 0)
        close_ranks()
    dist.destroy_process_group()


def main():
    import rl_megatron_peft.backend.resume  # noqa: F401 - once, before the forks

    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    for size in WORLDS:
        in_ranks(size, rank_main, size, model, out)


if __name__ == "__main__":
    main()
