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
from megatron_program import arguments_of, batch_of, bytes_of, logits_of, loss, policy_of, steps_of
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
        read = [part for _, parts in again.optimizer.state() for part in parts.values()]
        found["resumed"] = np.concatenate([part.numpy().ravel().copy() for part in read])
    again.restore(before)
    found["restored"] = np.concatenate(
        [part.numpy().ravel() for _, parts in again.optimizer.state() for part in parts.values()]
    )
    steps_of(again, 2, 4)
    few_rows(again)
    found["later"] = logits_of(again).numpy()
    found["bytes"] = bytes_of(policy)
    if keep:
        np.savez(out.with_suffix(".npz"), **found)
        np.savez(out.parent / f"{out.name}-weights.npz", **exported)


def adapt(model, out, ranks):
    """Train adapters of the attention and export them."""
    from rl_megatron_peft import LoraConfig
    from rl_megatron_peft.backend.policy import MegatronPolicyBackend

    lora = LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    policy = MegatronPolicyBackend(model, ranks=ranks, **{**arguments_of("fused", loss=loss), "lora": lora})
    steps_of(policy, 0, 2)
    policy.save_pretrained(out / "adapter")
    return logits_of(policy).numpy()


def rank_main(rank, size, model, out):
    import datetime

    import numpy as np
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
        if name in ("one", "ep2"):
            adapted = adapt(model, out / name, ranks)
            if rank == 0:
                np.savez(out / f"{name}-adapted.npz", adapted=adapted)
        close_ranks()
    dist.destroy_process_group()


def main():
    import rl_megatron_peft.backend.resume  # noqa: F401 - once, before the forks

    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    for size in WORLDS:
        in_ranks(size, rank_main, size, model, out)


if __name__ == "__main__":
    main()
