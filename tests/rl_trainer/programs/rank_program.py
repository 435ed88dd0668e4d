"""A training run on two ranks, started by backends/test_parallel_strategy.py.

Arguments: MODEL OUT. Both ranks run five updates of every scenario together. Then rank 0 runs
them as the only rank, and rank 1 runs them in plain torch. Results go to
<out>/{two/0,two/1,one/0,plain}/<scenario>.npz.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from onednn import by_onednn
from ranks import in_ranks, join_ranks

from rl_protocol import BatchData, balanced_parts, ragged
from rl_protocol.support.rendezvous import RendezvousListener
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, FsdpConfig, LoraConfig, OptimConfig
from rl_trainer.algorithms.batching import split_over_ranks
from rl_trainer.backends.parallel_strategy import FsdpStrategy, PlainStrategy
from rl_trainer.backends.token_batch import lengths_of
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import World
from rl_trainer.config.optim import Schedule

COSINE = OptimConfig(lr=1e-3, lr_warmup_steps=2, lr_scheduler_type="cosine", lr_decay_steps=20, min_lr_ratio=0.1)
LINEAR = OptimConfig(lr=1e-3, lr_scheduler_type="linear", lr_decay_steps=15)
LORA = LoraConfig(rank=4, alpha=8)
JOINED = {"ppo_mini_batch_size": 4, "ppo_max_token_len": 30, "use_remove_padding": True, "optim": LINEAR}
RECOMPUTED = {"activation_checkpointing": True}
SCENARIOS = {
    "full": {"actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3, "ppo_epochs": 2, "use_kl_loss": True}},
    "seq_mean": {
        "actor": {"ppo_mini_batch_size": 4, "loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01},
        "fsdp": {"reshard_after_forward": False},
    },
    "idle": {"actor": {"ppo_mini_batch_size": 2}, "rows": 5},
    "packed_recomputed": {"actor": JOINED, "fsdp": RECOMPUTED},
    "lora": {"actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3}, "lora": LORA},
    "lora_packed_recomputed": {"actor": JOINED, "fsdp": RECOMPUTED, "lora": LoraConfig(rank=4, alpha=8, use_dora=True)},
    "bf16": {"actor": {"ppo_mini_batch_size": 4}, "fsdp": {"param_dtype": "bfloat16"}},
    "bf16_lora": {
        "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3},
        "fsdp": {"param_dtype": "bfloat16", **RECOMPUTED},
        "lora": LORA,
    },
    "onednn": {"actor": JOINED, "fsdp": RECOMPUTED, "onednn": True},
    "critic": {"critic": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 3, "ppo_epochs": 2}},
    "critic_packed_recomputed": {"critic": JOINED, "fsdp": RECOMPUTED},
    "critic_lora": {"critic": JOINED, "fsdp": RECOMPUTED, "lora": LoraConfig(rank=4, alpha=8, use_dora=True)},
}
UPDATES = 5


def batch_of(base: TorchPolicyBackend, rows: int, seed: int) -> BatchData:
    """Return ragged trajectories whose old policy is `base`, the same on every rank."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 14, rng.integers(1, 6)).tolist() for _ in range(rows)]
    responses = [rng.integers(1, 14, rng.integers(1, 9)).tolist() for _ in range(rows)]
    tokens = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})

    def column(mean: float, spread: float):
        return ragged([(mean + spread * rng.normal(size=len(r))).tolist() for r in responses], "float32")

    return BatchData(
        {
            **tokens.columns,
            "response_mask": ragged([(rng.random(len(r)) < 0.8).tolist() for r in responses], "bool"),
            "old_log_probs": base.compute_log_probs(tokens, temperature=1.0)["log_probs"],
            "advantages": column(0.0, 1.0),
            "ref_log_prob": column(-2.0, 0.1),
            "values": column(0.0, 0.2),
            "returns": column(0.5, 0.5),
        }
    )


def run(
    scenario: str, path: Path, base: TorchPolicyBackend, world: World, out_folder: Path, *, plain: bool
) -> dict[str, object]:
    """Run five updates of this rank's share; return weights, metrics and its outputs by row."""
    how = SCENARIOS[scenario]
    strategy = PlainStrategy() if plain else FsdpStrategy(FsdpConfig(device="cpu", **how.get("fsdp", {})), world)
    is_critic = "critic" in how
    if is_critic:
        config = CriticConfig(**({"optim": COSINE} | how["critic"]))
        model = TorchCriticBackend(path, config, lora=how.get("lora"), rollout_n=1, seed=0, strategy=strategy)
    else:
        config = ActorConfig(**({"optim": COSINE} | how["actor"]))
        model = TorchPolicyBackend(path, config, lora=how.get("lora"), seed=0, strategy=strategy)
    schedule = Schedule(epochs=config.ppo_epochs, mini_batch_rows=config.ppo_mini_batch_size, seed=0)
    out, data = {}, None
    for update in range(UPDATES):
        data = batch_of(base, how.get("rows", 7), update)
        if scenario == "bf16_lora":  # the first pass is one of the reference, as in a run with a KL loss
            model.compute_reference_log_probs(data.select_fields(["prompts", "responses"]), temperature=1.0)
        share = split_over_ranks(lengths_of(data), schedule, update, world.size)[world.rank]
        own = data.select_rows(list(share.rows))
        more = {} if is_critic else {"temperature": 1.0}
        metrics = model.update(data, **more) if plain else model.update_local(own, share.mini_batches, **more)
        out |= {f"metric/{update}/{name}": value for name, value in metrics.items()}
    rows = balanced_parts(lengths_of(data), world.size)[world.rank]
    tokens = data.select_rows(rows).select_fields(["prompts", "responses"])
    if is_critic:
        found = {"values": model.compute_values(tokens).ragged("values")}
    else:
        computed = model.compute_log_probs(tokens, temperature=0.9)
        found = {name: computed.ragged(name) for name in computed.field_names}
        if "lora" in how:
            off = model.compute_reference_log_probs(tokens, temperature=0.9)
            found["reference"] = off.ragged("log_probs")
        if scenario == "bf16":
            frozen = TorchPolicyBackend(path, config, strategy=strategy, options=PolicyOptions(frozen=True))
            assert {weight.dtype for weight in frozen._model.parameters()} == {torch.bfloat16}
            found["frozen"] = frozen.compute_log_probs(tokens, temperature=0.9).ragged("log_probs")
            found["exact"] = base.compute_log_probs(tokens, temperature=0.9).ragged("log_probs")
        out |= {f"weight/{w.name}": from_weight(w).float().numpy().copy() for w in model.named_weights()}
        model.save_pretrained(out_folder / f"checkpoint-{scenario}")
    for name, column in found.items():
        out |= {f"row/{name}/{row}": column.row(i) for i, row in enumerate(rows)}
    return out


def run_all(path: Path, base: TorchPolicyBackend, world: World, folder: Path, *, plain: bool = False) -> None:
    """Run every scenario; plain torch runs only those in float32."""
    folder.mkdir(parents=True)
    for scenario, how in SCENARIOS.items():
        if not plain or how.get("fsdp", {}).get("param_dtype") != "bfloat16":
            with by_onednn() if how.get("onednn") and not plain else nullcontext() as products:
                found = run(scenario, path, base, world, folder, plain=plain)
            assert products is None or products
            np.savez(folder / f"{scenario}.npz", **found)


def rank_main(rank: int, path: Path, out: Path, listener: RendezvousListener) -> None:
    torch.set_num_threads(1)
    base = TorchPolicyBackend(path, None)
    for name, size in (("two", 2), ("one", 1)):
        if rank < size:
            world = join_ranks(rank, size, listener)
            run_all(path, base, world, out / name / str(rank))
            dist.destroy_process_group()
    if rank:
        run_all(path, base, World(), out / "plain", plain=True)


if __name__ == "__main__":
    in_ranks(2, rank_main, Path(sys.argv[1]), Path(sys.argv[2]), RendezvousListener())
