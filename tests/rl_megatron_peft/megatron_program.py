"""Run Megatron-Core over gloo: megatron_program.py MODELS OUT CASES WORLD...

Forks the ranks of each world after all imports; a world runs its layouts one after another. Results
go to <out>/<layout>/. The top of the file has no heavy imports, because Megatron's checkpoint
writer starts processes that import this file again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from ranks import in_ranks

WORLDS = {
    "one": {"one": (1, 1)},
    "two": {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1), "zero2": (1, 1), "sp2": (2, 1, True)},
    "grid": {"tp2pp2": (2, 2)},
    "four": {"sp2pp2": (2, 2, True), "zero2tp2": (2, 1), "zero2pp2": (1, 2), "zero4": (1, 1)},
}  # in zero<n>, n replicas share the optimizer state
CASES = {"some": (("llama", "fused"), ("qwen2", "canonical"), ("qwen3", "fused"), ("qwen2", "fused-dora"))}
CASES["rest"] = (("llama", "canonical"), ("qwen2", "fused"), ("qwen3", "canonical"), ("llama", "canonical-dora"))
CASES["all"] = CASES["some"] + CASES["rest"]
CURVES = {
    "some": (
        ("qwen2", "fused", True, 0.0),
        ("qwen3", "canonical-dora", False, 0.3),
        ("even", "whole", True, 0.0),
    )
}
CURVES["rest"] = (("qwen3", "canonical-dora", True, 0.0), ("even", "whole", True, 0.0))
CURVES["all"] = CURVES["rest"]
# CURVES: family, kind, whether it resumes halfway (Megatron's writer is slow), dropout
CRITICS = {"some": (("tied", "whole", True), ("llama", "fused", False)), "rest": (("even", "whole", False),)}
CRITICS["all"] = CRITICS["rest"]
# CRITICS: family, kind, whether it also uses Megatron's writer
BEFORE = {
    "one": "one",
    "tp2": "one",
    "pp2": "tp2",
    "dp2": "pp2",
    "zero2": "dp2",
    "tp2pp2": "zero2",
    "zero2tp2": "zero2",
}
SIZES = {"one": 1, "two": 2, "grid": 4, "four": 4}
HEAD = {"value_head.weight": [[0.1 * (-1) ** i for i in range(32)]], "value_head.bias": [0.3]}
TARGETS = {"fused": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
TARGETS["canonical"] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
TARGETS |= {f"{kind}-dora": targets for kind, targets in TARGETS.items()}


def batch_of(rows, seed, share=(0, 1)):
    """Return ragged trajectories, the same on every rank; `share` is (replica, replicas)."""
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
    """REINFORCE with a small entropy bonus, as one micro-batch's share of the loss."""
    import torch

    mask = torch.tensor(micro.ragged("response_mask").values)
    advantages = torch.tensor(micro.ragged("advantages").values)
    per_token = -advantages * log_prob - 0.01 * entropy
    share = (per_token * mask).sum() / max(counts.tokens, 1)
    return share, {"entropy": (float((entropy.detach() * mask).sum()), float(mask.sum()))}


def policy_of(path, ranks, kind, dropout=0.0, **more):
    from rl_megatron_peft.backend.policy import MegatronPolicyBackend

    return MegatronPolicyBackend(path, ranks=ranks, **arguments_of(kind, dropout, **{"loss": loss, **more}))


def arguments_of(kind, dropout=0.0, **more):
    """Return a backend's arguments; `more` replaces arguments or fields of TrainSettings."""
    import dataclasses

    from rl_megatron_peft import LoraConfig
    from rl_megatron_peft.backend.train.settings import AdamConfig, TrainSettings

    how = {"dropout": dropout, "use_dora": kind.endswith("-dora")}
    lora = None if kind == "whole" else LoraConfig(rank=3, alpha=6, target_modules=TARGETS[kind], **how)
    adam = AdamConfig(lr=3e-2 if lora else 1e-3, weight_decay=0.01, grad_clip=0.5)
    fields = {"adam": adam, "fused": kind.startswith("fused"), "micro_batch_rows": 3, "seed": 5}
    fields |= {field.name: more.pop(field.name) for field in dataclasses.fields(TrainSettings) if field.name in more}
    return {"lora": lora, "settings": TrainSettings(**fields), **more}


def value_loss(values, micro, counts):
    """Squared error to the advantages, as one micro-batch's share of the loss."""
    import torch

    mask = torch.tensor(micro.ragged("response_mask").values)
    error = values - torch.tensor(micro.ragged("advantages").values)
    share = 0.5 * (error.square() * mask).sum() / max(counts.tokens, 1)
    return share, {"vf_loss": (float(0.5 * (error.detach().square() * mask).sum()), float(mask.sum()))}


def critic_of(path, ranks, kind, **more):
    """Return a critic whose head is not zero."""
    import torch

    from rl_megatron_peft.backend.critic import MegatronCriticBackend

    critic = MegatronCriticBackend(path, ranks=ranks, **arguments_of(kind, **{"loss": value_loss, **more}))
    with torch.no_grad():
        for one in critic.optimizer.trained:
            if one.keys[0] in HEAD:
                one.parameter.copy_(torch.tensor(HEAD[one.keys[0]]))
    return critic


def values_of(critic):
    """Return the values [T] of a batch's response tokens, on every rank."""
    return critic.compute_values(batch_of(5, 99)).ragged("values").values


def same_state(one, other):
    """Return whether factors, moments and counters are bit-equal."""
    import torch

    pairs = zip(one.optimizer.state(), other.optimizer.state(), strict=True)
    same = all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for (_, a), (_, b) in pairs)
    return same and (one.optimizer.steps, one.updates) == (other.optimizer.steps, other.updates)


def logits_of(policy):
    """Return the logits [T, vocab] of a batch's response tokens, on every rank."""
    import torch

    from rl_megatron_peft.backend.cpu_shims import runnable
    from rl_megatron_peft.backend.parallel import broadcast_from_stage
    from rl_megatron_peft.backend.train.forward_backward import Stage, run_passes

    batch = batch_of(5, 99)
    parts = [batch.slice(0, 2), batch.slice(2, 5)]
    with torch.no_grad(), runnable():
        stage = Stage(policy.model, policy.ranks.device, vocab=15)
        found = run_passes(stage, parts, lambda _, logits: logits, train=False)
    tokens = batch.ragged("responses").values.shape[0]
    return broadcast_from_stage(
        torch.cat(found) if found else torch.empty(tokens, 15), policy.ranks.layout.pipeline - 1
    )


def state_of(policy):
    return {factor.key: factor.parameter.detach().clone() for lora in policy.adapters for factor in lora.factors()}


def factors_of(policy):
    """Return key -> bytes of every adapter factor."""
    return {f.key: f.parameter.detach().numpy().tobytes() for a in policy.adapters for f in a.factors()}


def bytes_of(policy):
    """Return the size of the optimizer state on each rank.

    It counts the moments and the parameter copies that do not belong to the model.
    """
    from rl_megatron_peft.backend.parallel import all_gather_json

    adam, own = policy.optimizer.adam, {id(p) for p in policy.model.parameters()}
    tensors = [t for slots in adam.state.values() for t in slots.values() if t.ndim]
    tensors += [p for group in adam.param_groups for p in group["params"] if id(p) not in own]
    return all_gather_json(sum(t.numel() * t.element_size() for t in tensors), policy.ranks.device)


def shared_state(models, out, ranks, keep):
    """Compare replicas that share the optimizer state with replicas that do not."""
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
            state, now = ({k: t for _, parts in p.optimizer.state() for k, t in parts.items()} for p in (shared, again))
            assert all(torch.equal(now[key], tensor) for key, tensor in state.items())
            assert again.optimizer.steps == 3
        steps_of(again, 3, 4)
        steps_of(shared, 3, 4)
        pairs = list(zip(again.model.parameters(), shared.model.parameters(), strict=True))
        found[f"{name}-later"] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    if keep:
        np.savez(out / "shared-state.npz", **found)


def grid(models, out, ranks, keep, cases):
    """Save logits of base and adapter: trained, off, merged, exported and read back."""
    import numpy as np
    import torch

    from rl_megatron_peft.backend.lora.attach import adapters_off, merged
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
    """Run steps first..last-1 on the same mini-batches in every layout; return their metrics."""
    share = (policy.ranks.data, policy.ranks.replicas)
    how = {} if policy.has_value_head else {"temperature": 0.9}
    reports = [policy.update(batch_of(7, step % 3, share), **how) for step in range(first, last)]
    return {name: [report[name] for report in reports] for name in reports[0]}


def curve(models, out, ranks, keep, curves, how):
    """Run ten steps in every layout; some also resume at step five from the previous layout."""
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
            # written after more steps, as a background thread would
            write(out / f"{family}-5-state")
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
    """Save values before and after six steps; repeat from step three of the previous layout."""
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
    """Yield (name, ranks) of each layout in one of `size` processes, which share a file `store`."""
    import datetime

    import torch
    import torch.distributed as dist

    from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
    from rl_megatron_peft.base_model.layout import Layout

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
    )
    for name, layout in layouts.items():
        yield name, open_ranks(Layout(**dict(zip(("tensor", "pipeline", "sequence_parallel"), layout, strict=False))))
        close_ranks()
    dist.destroy_process_group()


def rank_main(rank, world, models, out, cases):
    for name, ranks in through_layouts(WORLDS[world], rank, SIZES[world], out / f"{world}-store"):
        folder = out / name
        folder.mkdir(exist_ok=True)
        tokens_shared = name.startswith("sp")  # sequence parallelism stores nothing differently
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
    """Resume from the last complete checkpoint; write one after every step until killed."""
    import torch
    import torch.distributed as dist

    from rl_megatron_peft import whole_checkpoints
    from rl_megatron_peft.backend.parallel import open_ranks
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint
    from rl_megatron_peft.base_model.layout import Layout

    os.setsid()  # so that the kill also ends the helpers of Megatron's writer
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
    """Kill eleven processes one after another, each at a random moment while it writes."""
    import random
    import signal
    import time

    draw = random.Random(1)
    (out / "checkpoints").mkdir()

    def wait_until(done):
        deadline = time.monotonic() + 300
        while not done():
            if time.monotonic() > deadline or process.exitcode is not None:
                process.kill()
                sys.exit(1)
            time.sleep(0.02)

    save_s = 0.0
    for life in range(11):
        process = fork.Process(target=killed_main, args=(models, out))
        process.start()
        # the lambda is called in this iteration
        wait_until(lambda: (out / "killed").exists() and len((out / "killed").read_text().split()) > life)  # noqa: B023
        if not save_s:  # measure a step with its checkpoint on this machine
            start = time.monotonic()
            wait_until((out / "checkpoints" / "step-1").exists)
            save_s = time.monotonic() - start
        time.sleep(draw.uniform(0.0, 2 * save_s))
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


def main():
    # before the fork, once for all ranks
    import rl_megatron_peft.backend.resume  # noqa: F401

    models, out, cases, *worlds = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    if worlds == ["killed"]:
        kill_at_ten_moments(multiprocessing.get_context("fork"), models, out)
        return
    for world in worlds:
        in_ranks(SIZES[world], rank_main, world, models, out, cases)


if __name__ == "__main__":
    main()
