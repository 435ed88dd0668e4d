"""Megatron-Core over gloo, started by the tests as a process of its own: models out cases world...

Forks the ranks of each world once everything is imported; a world goes through its layouts in turn. Results go to <out>/<layout>/.
Imports nothing heavy at the top: Megatron's checkpoint writer starts helpers that import this file again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

WORLDS = {
    "one": {"one": (1, 1)},
    "two": {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1), "zero2": (1, 1), "sp2": (2, 1, True)},
    "four": {"tp2pp2": (2, 2), "sp2pp2": (2, 2, True), "zero2tp2": (2, 1), "zero2pp2": (1, 2), "zero4": (1, 1)},
}  # zero<n>: so many replicas share the optimizer's state
CASES = {"some": (("llama", "fused"), ("qwen2", "canonical"), ("qwen3", "fused"), ("qwen2", "fused-dora"))}
CASES["rest"] = (("llama", "canonical"), ("qwen2", "fused"), ("qwen3", "canonical"), ("llama", "canonical-dora"))
CASES["all"] = CASES["some"] + CASES["rest"]
CURVES = {"some": (("qwen2", "fused", True, 0.0), ("qwen3", "canonical-dora", False, 0.3))}
CURVES["rest"] = (("qwen3", "canonical-dora", True, 0.0), ("even", "whole", True, 0.0))
CURVES["all"] = CURVES["rest"]
# family, kind, whether it is resumed half way (Megatron's writer takes longer than all else), dropout
CRITICS = {"some": (("tied", "whole", True), ("llama", "fused", False)), "rest": (("even", "whole", False),)}
CRITICS["all"] = CRITICS["rest"]
# family, kind, whether Megatron's writer is used as well
BEFORE = {
    "one": "one",
    "tp2": "one",
    "pp2": "tp2",
    "dp2": "pp2",
    "zero2": "dp2",
    "tp2pp2": "zero2",
    "zero2tp2": "zero2",
}
SIZES = {"one": 1, "two": 2, "four": 4}
HEAD = {"value_head.weight": [[0.1 * (-1) ** i for i in range(32)]], "value_head.bias": [0.3]}
TARGETS = {"fused": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
TARGETS["canonical"] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
TARGETS |= {f"{kind}-dora": targets for kind, targets in TARGETS.items()}


def batch_of(rows, seed, share=(0, 1)):
    """Ragged trajectories, the same on every rank; of a replica its share alone."""
    import numpy as np

    from rl_protocol import BatchData, ragged

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 15, rng.integers(1, 6)).tolist() for _ in range(rows)]
    responses = [rng.integers(1, 15, rng.integers(1, 9)).tolist() for _ in range(rows)]
    batch = BatchData(
        {
            "prompts": ragged(prompts, "int64"),
            "responses": ragged(responses, "int64"),
            "response_mask": ragged([(rng.random(len(r)) < 0.8).tolist() for r in responses], "bool"),
            "advantages": ragged([rng.normal(size=len(r)).tolist() for r in responses], "float32"),
        }
    )
    return batch.select_rows(list(range(share[0], rows, share[1])))


def loss(log_prob, entropy, micro, counts):
    """REINFORCE with a little entropy, as a share of the mini-batch: stands for the trainer's loss."""
    import torch

    mask = torch.tensor(micro.ragged("response_mask").values)
    advantages = torch.tensor(micro.ragged("advantages").values)
    per_token = -advantages * log_prob - 0.01 * entropy
    share = (per_token * mask).sum() / max(counts.tokens, 1)
    return share, {"entropy": (float((entropy.detach() * mask).sum()), float(mask.sum()))}


def policy_of(path, ranks, kind, dropout=0.0, **more):
    from rl_megatron_peft.backend.policy import MegatronPolicyBackend

    settings = {**settings_of(kind, dropout), "loss": loss}
    return MegatronPolicyBackend(path, ranks=ranks, **{**settings, **more})


def settings_of(kind, dropout=0.0):
    from rl_megatron_peft import LoraConfig
    from rl_megatron_peft.backend.optimise import AdamConfig

    how = {"dropout": dropout, "use_dora": kind.endswith("-dora")}
    lora = None if kind == "whole" else LoraConfig(rank=3, alpha=6, target_modules=TARGETS[kind], **how)
    adam = AdamConfig(lr=3e-2 if lora else 1e-3, weight_decay=0.01, grad_clip=0.5)
    return {"lora": lora, "adam": adam, "fused": kind.startswith("fused"), "micro_batch_rows": 3, "seed": 5}


def value_loss(values, micro, counts):
    """Squared error, where the advantages stand for the returns: stands for the trainer's loss."""
    import torch

    mask = torch.tensor(micro.ragged("response_mask").values)
    error = values - torch.tensor(micro.ragged("advantages").values)
    share = 0.5 * (error.square() * mask).sum() / max(counts.tokens, 1)
    return share, {"vf_loss": (float(0.5 * (error.detach().square() * mask).sum()), float(mask.sum()))}


def critic_of(path, ranks, kind, **more):
    """With a head that has learnt something."""
    import torch

    from rl_megatron_peft.backend.critic import MegatronCriticBackend

    critic = MegatronCriticBackend(path, ranks=ranks, **{**settings_of(kind), "loss": value_loss, **more})
    with torch.no_grad():
        for one in critic.optimiser.trained:
            if one.keys[0] in HEAD:
                one.parameter.copy_(torch.tensor(HEAD[one.keys[0]]))
    return critic


def values_of(critic):
    """[T] of all response tokens of a batch, on every rank."""
    return critic.compute_values(batch_of(5, 99)).ragged("values").values


def same_state(one, other):
    """Bit for bit: factors, moments and counters."""
    import torch

    pairs = zip(one.optimiser.state(), other.optimiser.state(), strict=True)
    same = all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for (_, a), (_, b) in pairs)
    return same and (one.optimiser.steps, one.updates) == (other.optimiser.steps, other.updates)


def logits_of(policy):
    """[T, vocab] of all response tokens of a batch, on every rank."""
    import torch

    from rl_megatron_peft.backend.compat import runnable
    from rl_megatron_peft.backend.parallel import from_stage
    from rl_megatron_peft.backend.passes import run_passes

    batch = batch_of(5, 99)
    parts = [batch.slice(0, 2), batch.slice(2, 5)]
    with torch.no_grad(), runnable():
        found = run_passes(policy.model, parts, 15, policy.ranks.device, lambda _, logits: logits, train=False)
    tokens = batch.ragged("responses").values.shape[0]
    return from_stage(torch.cat(found) if found else torch.empty(tokens, 15), policy.ranks.layout.pipeline - 1)


def state_of(policy):
    return {factor.key: factor.parameter.detach().clone() for lora in policy.adapters for factor in lora.factors()}


def bytes_of(policy):
    """Of the optimizer's state, on each rank: moments, and values that are not the model's own."""
    from rl_megatron_peft.backend.parallel import gather_json

    adam, own = policy.optimiser.adam, {id(p) for p in policy.model.parameters()}
    tensors = [t for slots in adam.state.values() for t in slots.values() if t.ndim]
    tensors += [p for group in adam.param_groups for p in group["params"] if id(p) not in own]
    return gather_json(sum(t.numel() * t.element_size() for t in tensors), policy.ranks.device)


def shared_state(models, out, ranks, keep):
    """Replicas that share the optimizer's state beside those that do not: of two factors, so that some have no state, and of bfloat16."""
    import numpy as np
    import torch

    from rl_megatron_peft import LoraConfig
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    few = LoraConfig(rank=2, target_modules=("down_proj",), exclude=("layers.0.mlp.down_proj",))
    cases = {"few": ("llama", "canonical", {"lora": few})}
    if ranks.layout.pipeline == 1:
        cases["bfloat16"] = ("even", "whole", {"dtype": torch.bfloat16})
    found = {}
    for name, (family, kind, how) in cases.items():
        each, shared, again = (
            policy_of(models / family, ranks, kind, **how, distributed_optimizer=shares)
            for shares in (False, True, False)
        )
        steps_of(each, 0, 3)
        steps_of(shared, 0, 3)
        pairs = list(zip(each.model.parameters(), shared.model.parameters(), strict=True))
        found[f"{name}-difference"] = max(float((one - other).detach().abs().max()) for one, other in pairs)
        found[f"{name}-bytes"] = [bytes_of(each), bytes_of(shared)]
        save_checkpoint(shared, out / f"{name}-3")
        (out / name).mkdir(exist_ok=True)
        shared.snapshot()(out / name)
        torch.distributed.barrier()
        for restore in (
            again.restore,
            lambda path, into=again: load_checkpoint(into, path.with_name(f"{path.name}-3")),
        ):
            restore(out / name)
            state, now = ({k: t for _, parts in p.optimiser.state() for k, t in parts.items()} for p in (shared, again))
            assert all(torch.equal(now[key], tensor) for key, tensor in state.items())
            assert again.optimiser.steps == 3
        steps_of(again, 3, 4)
        steps_of(shared, 3, 4)
        pairs = list(zip(again.model.parameters(), shared.model.parameters(), strict=True))
        found[f"{name}-later"] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    if keep:
        np.savez(out / "shared-state.npz", **found)


def grid(models, out, ranks, keep, cases):
    """Logits of base and trained adapter, every way of switching it off or in, export and import."""
    import numpy as np
    import torch

    from rl_megatron_peft.backend.lora import adapters_off, merged
    from rl_protocol.torch import from_weight

    for family, kind in cases:
        policy = policy_of(models / family, ranks, kind)
        found = {"fresh": logits_of(policy)}
        with adapters_off(policy.adapters):
            found["base"] = logits_of(policy)
        for step in range(3):
            policy.update(batch_of(6, step), temperature=1.0)
        found["trained"] = logits_of(policy)
        with adapters_off(policy.adapters):
            found["off"] = logits_of(policy)
        weights = [p.detach().clone() for p in policy.model.parameters()]
        with merged(policy.model):
            found["merged"] = logits_of(policy)
        same = [torch.equal(p, w) for p, w in zip(policy.model.parameters(), weights, strict=True)]
        found["unmerged"] = torch.tensor(all(same))
        folder = out / f"{family}-{kind}"
        policy.save_pretrained(folder)
        again = policy_of(models / family, ranks, kind, seed=6)
        again.load_adapter(folder)
        own, read = state_of(policy), state_of(again)
        found["reread"] = torch.tensor(
            own.keys() == read.keys() and all(torch.equal(own[key], read[key]) for key in own)
        )
        exported = {weight.name: from_weight(weight).clone() for weight in policy.named_weights()}
        if keep:
            np.savez(out / f"{family}-{kind}.npz", **{name: value.numpy() for name, value in found.items()})
            np.savez(out / f"{family}-{kind}-weights.npz", **{name: value.numpy() for name, value in exported.items()})


def steps_of(policy, first, last):
    """What steps first..last-1 reported: the same mini-batches in every layout, a replica's share of them."""
    share = (policy.ranks.data, policy.ranks.replicas)
    how = {} if policy.values else {"temperature": 0.9}
    reports = [policy.update(batch_of(7, step % 3, share), **how) for step in range(first, last)]
    return {name: [report[name] for report in reports] for name in reports[0]}


def curve(models, out, ranks, keep, curves, how):
    """Ten steps on the same mini-batches whatever the layout; resumed ones again from step five of the layout before."""
    import numpy as np

    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    for family, kind, resumed, dropout in curves:
        policy = policy_of(models / family, ranks, kind, dropout, **how)
        begin = steps_of(policy, 0, 5)
        if resumed:
            save_checkpoint(policy, out / f"{family}-5")
            (out / f"{family}-5-state").mkdir(exist_ok=True)
            write = policy.snapshot()
        end = steps_of(policy, 5, 10)
        if resumed:
            write(out / f"{family}-5-state")  # later than it was taken, as a thread would
        found = {f"curve-{family}": {name: begin[name] + end[name] for name in begin}}
        if resumed:
            again = policy_of(models / family, ranks, kind, seed=77, **how)
            load_checkpoint(again, out.parent / BEFORE[out.name] / f"{family}-5")
            other = policy_of(models / family, ranks, kind, seed=78, **how)
            other.restore(out.parent / BEFORE[out.name] / f"{family}-5-state")
            assert same_state(again, other)
            found[f"resumed-{family}"] = steps_of(again, 5, 10)
            found[f"restored-{family}"] = steps_of(other, 5, 10)
        for name, table in found.items() if keep else ():
            np.savez(out / f"{name}.npz", **table)


def critics(models, out, ranks, keep, cases, how):
    """Values before and after six steps, which are gone on with from step three of the layout before."""
    import numpy as np

    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    for family, kind, written in cases:
        critic, name = critic_of(models / family, ranks, kind, **how), f"critic-{family}"
        before = out.parent / BEFORE.get(out.name, out.name)
        found = {"before": values_of(critic)}
        begin = steps_of(critic, 0, 3)
        (out / name).mkdir(exist_ok=True)
        critic.snapshot()(out / name)
        if written:
            save_checkpoint(critic, out / f"{name}-3")
        end = steps_of(critic, 3, 6)
        critic.save_pretrained(out / f"{name}-model")
        found |= {"after": values_of(critic), **{metric: begin[metric] + end[metric] for metric in begin}}
        again = critic_of(models / family, ranks, kind, seed=77, **how)
        again.restore(before / name)
        if written:
            other = critic_of(models / family, ranks, kind, seed=78, **how)
            load_checkpoint(other, before / f"{name}-3")
            assert same_state(again, other)
        steps_of(again, 3, 6)
        found["again"] = values_of(again)
        if keep:
            np.savez(out / f"{name}.npz", **found)


def through_layouts(layouts, rank, size, store):
    """(name, ranks) of each layout in turn, in one of `size` processes that find each other through the file `store`."""
    import datetime

    import torch
    import torch.distributed as dist

    from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
    from rl_megatron_peft.layout import Layout

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
    )
    for name, layout in layouts.items():
        yield name, open_ranks(Layout(**dict(zip(("tensor", "pipeline", "sequence_parallel"), layout, strict=False))))
        close_ranks()
    dist.destroy_process_group()


def in_ranks(size, main, *arguments):
    """Call main(rank, *arguments) in so many forks of this process, and end it when one of them fails."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def rank_main(rank, world, models, out, cases):
    for name, ranks in through_layouts(WORLDS[world], rank, SIZES[world], out / f"{world}-store"):
        folder = out / name
        folder.mkdir(exist_ok=True)
        tokens_shared = name.startswith("sp")  # nothing is stored in another way
        how = {"distributed_optimizer": name.startswith("zero")}
        if name.startswith("zero"):
            shared_state(models, folder, ranks, keep=rank == 0)
        if name in ("zero2pp2", "zero4"):
            continue
        if ranks.replicas == 1 and not tokens_shared:
            grid(models, folder, ranks, keep=rank == 0, cases=CASES[cases])
        curves = [(*what, resumed and not tokens_shared, dropout) for *what, resumed, dropout in CURVES[cases]]
        curve(models, folder, ranks, keep=rank == 0, curves=curves, how=how)
        critics(models, folder, ranks, keep=rank == 0, cases=CRITICS[cases], how=how)


def killed_main(models, out):
    """Go on from the last whole checkpoint, if any, and write one after every step, until killed."""
    import torch
    import torch.distributed as dist

    from rl_megatron_peft import whole_checkpoints
    from rl_megatron_peft.backend.parallel import open_ranks
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
    from rl_megatron_peft.layout import Layout

    os.setsid()  # Megatron's writer has helpers, which are to die as well
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = policy_of(models / "llama", open_ranks(Layout()), "fused")
    root = out / "checkpoints"
    for last in list(whole_checkpoints(root))[-1:]:
        load_checkpoint(policy, last)
    with (out / "killed").open("a") as report:
        print(policy.updates, file=report)
    while policy.updates < 200:
        policy.update(batch_of(2, policy.updates), temperature=1.0)
        save_checkpoint(policy, root / f"step-{policy.updates}")


def kill_at_ten_moments(fork, models, out):
    """Each process is killed while it writes, or has just begun to, at a moment of its own."""
    import random
    import signal
    import time

    draw = random.Random(1)
    (out / "checkpoints").mkdir()

    def wait_until(done):
        deadline = time.monotonic() + 60
        while not done():
            if time.monotonic() > deadline or process.exitcode is not None:
                process.kill()
                sys.exit(1)
            time.sleep(0.02)

    save_s = 0.0
    for life in range(11):
        process = fork.Process(target=killed_main, args=(models, out))
        process.start()
        wait_until(lambda: (out / "killed").exists() and len((out / "killed").read_text().split()) > life)  # noqa: B023 - called here
        if (
            not save_s
        ):  # how long a step and its checkpoint take on this machine: the moments are drawn from two of them
            start = time.monotonic()
            wait_until((out / "checkpoints" / "step-1").exists)
            save_s = time.monotonic() - start
        time.sleep(draw.uniform(0.0, 2 * save_s))
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


def main():
    import rl_megatron_peft.backend.resume  # noqa: F401 - before the fork, once for all ranks

    models, out, cases, *worlds = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    if worlds == ["killed"]:
        kill_at_ten_moments(multiprocessing.get_context("fork"), models, out)
        return
    for world in worlds:
        in_ranks(SIZES[world], rank_main, world, models, out, cases)


if __name__ == "__main__":
    main()
