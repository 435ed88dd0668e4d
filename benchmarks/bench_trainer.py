"""Measure the torch backend against a bare loop, packing, the driver, and what learns.

    uv run benchmarks/bench_trainer.py [--only throughput,packed,driver]
        [--set KEY=VALUE ..] [--smoke]
    uv run benchmarks/bench_trainer.py --only learning [--combinations rloo:gspo,...]
        [--seeds 0,1,2] [--steps N]

The first three run both sides in turns and take minutes. The last one runs the app as a user would,
once per combination and seed. `--smoke` makes everything tiny and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_learning import plot, run
from harness.pairs import Subject, paired, publish, summary, take_turns, verdict
from harness.results import command_line, write_result
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from rl_protocol import BatchData, ragged
from rl_trainer import ActorConfig, LoraConfig, OptimConfig
from rl_trainer.backends.torch_policy import TorchPolicyBackend

COMBINATIONS = {
    "grpo:vanilla": (),
    "dr_grpo:vanilla": ("actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=4"),
    "rloo:gspo": ("actor.loss_agg_mode=seq-mean-token-mean",),
    "reinforce_plus_plus:vanilla": (),
    "reinforce_plus_plus_baseline:cispo": (),
    "opo:sapo": (),
    "gpg:gpg": (),
    "remax:vanilla": (),
    "grpo_passk:dppo_tv": (),
    "optimal_token_baseline:dppo_kl": (),
    "rloo:clip_cov": (),
    "grpo:kl_cov": (),
    "grpo:geo_mean": ("actor.loss_agg_mode=seq-mean-token-mean",),
}
"""estimator:loss -> further overrides."""
OPTIM = OptimConfig(lr=1e-5, weight_decay=0.0)


def make_model(folder: Path, *, smoke: bool) -> Path:
    """A Qwen2 of 6.6 million weights over 4,096 tokens."""
    torch.manual_seed(0)
    size = 32 if smoke else 256
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(policy: TorchPolicyBackend, prompts: list[int], responses: list[int]) -> BatchData:
    """Trajectories of these lengths, with the columns an update reads."""
    rng = np.random.default_rng(0)

    def column(draw: Any, lengths: list[int], dtype: str) -> Any:
        return ragged([draw(n) for n in lengths], dtype)

    tokens = BatchData(
        {
            "prompts": column(lambda n: rng.integers(1, 4096, n), prompts, "int64"),
            "responses": column(lambda n: rng.integers(1, 4096, n), responses, "int64"),
        }
    )
    return BatchData(
        {
            **tokens.columns,
            "response_mask": column(lambda n: np.ones(n, np.bool_), responses, "bool"),
            "old_log_probs": policy.compute_log_probs(tokens, temperature=1.0)["log_probs"],
            "advantages": column(rng.standard_normal, responses, "float32"),
        }
    )


class BareLoop:
    """PPO on the same rectangular batch in the shortest plain PyTorch."""

    def __init__(self, path: Path, batch: BatchData, micro: int) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=OPTIM.lr, weight_decay=0.0, betas=(0.9, 0.999))
        rows, prompt = len(batch), int(batch.ragged("prompts").lengths[0])
        prompts, responses, old, advantages = (
            torch.tensor(batch.ragged(name).values).reshape(rows, -1)
            for name in ("prompts", "responses", "old_log_probs", "advantages")
        )
        self.ids = torch.cat([prompts, responses], 1)
        self.first, self.old, self.advantages, self.micro = prompt, old, advantages, micro

    def step(self) -> None:
        """One update of all rows in one mini-batch."""
        self.adam.zero_grad()
        for start in range(0, len(self.ids), self.micro):
            part = slice(start, start + self.micro)
            logits = self.model(input_ids=self.ids[part], use_cache=False).logits[:, self.first - 1 : -1]
            log_p = torch.log_softmax(logits, -1)
            entropy = -(log_p.exp() * log_p).sum(-1)  # reported by every PPO loop
            log_p = log_p.gather(-1, self.ids[part, self.first :, None])[..., 0]
            ratio = (log_p - self.old[part]).exp()
            a = self.advantages[part]
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).sum() / self.old.numel()
            loss.backward()
            float(entropy.detach().mean()), float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()


def policy_for(path: Path, rows: int, *, lora: LoraConfig | None = None, **how: Any) -> TorchPolicyBackend:
    """A backend whose update is one optimizer step over `rows` rows."""
    return TorchPolicyBackend(path, ActorConfig(optim=OPTIM, ppo_mini_batch_size=rows, **how), lora=lora, seed=0)


def throughput(path: Path, pairs: int, *, smoke: bool) -> list[dict[str, Any]]:
    """Tokens per second of a packed update against the bare loop, all cores, rectangular batch."""
    torch.set_num_threads(os.cpu_count() or 1)
    rows, prompt, response, micro = (4, 8, 8, 2) if smoke else (32, 64, 192, 8)
    ours = policy_for(path, rows, ppo_micro_batch_size=micro, use_remove_padding=True)
    batch = make_batch(ours, [prompt] * rows, [response] * rows)
    bare, me = BareLoop(path, batch, micro), [os.getpid()]
    timings = take_turns(
        [Subject("ours", lambda: ours.update(batch, temperature=1.0), me), Subject("bare", bare.step, me)], pairs
    )
    found = summary(timings)
    tokens = rows * (prompt + response)
    return [
        verdict(
            "tokens/s of an update, share of a bare PyTorch loop",
            paired(timings, "bare", "ours")["median"],
            0.97,
            1.0,
            at_least=True,
            threads=torch.get_num_threads(),
            cpu_ratio=paired(timings, "bare", "ours", "cpu"),
            tokens_per_s={name: round(tokens / (row["wall_ms"] / 1e3)) for name, row in found.items()},
            timings=found,
        )
    ]


def packed(path: Path, pairs: int, *, smoke: bool) -> list[dict[str, Any]]:
    """The same ragged batch padded and packed, one thread: update."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    rows = 6 if smoke else 32
    prompts = rng.integers(8, 64, rows).tolist()
    responses = np.minimum(rng.lognormal(4.0, 0.8, rows).astype(int) + 4, 400).tolist()
    padded = policy_for(path, rows, ppo_micro_batch_size=8)
    joined = policy_for(path, rows, ppo_max_token_len=2048, use_remove_padding=True)
    batch = make_batch(padded, prompts, responses)
    lengths, me = np.array(prompts) + np.array(responses), [os.getpid()]
    subjects = [
        Subject("padded", lambda: padded.update(batch, temperature=1.0), me),
        Subject("packed", lambda: joined.update(batch, temperature=1.0), me),
    ]
    timings = take_turns(subjects, pairs)
    return [
        verdict(
            "update of a ragged batch, padded against packed",
            paired(timings, "padded", "packed")["median"],
            1.0,
            1.5,
            at_least=True,
            cpu_ratio=paired(timings, "padded", "packed", "cpu"),
            longest_over_mean=float(lengths.max() / lengths.mean()),
            timings=summary(timings),
        )
    ]


def driver(more: Sequence[str], *, smoke: bool) -> list[dict[str, Any]]:
    """CPU time of the driver per step of the demo; two rollout workers, two actor ranks."""
    import json
    import subprocess
    import sys

    from harness.results import ROOT

    with tempfile.TemporaryDirectory() as folder:
        overrides = ["rollout.num_workers=2", "model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu"]
        overrides += ["data.demo=addition"]
        overrides += [f"trainer.output_dir={folder}", "trainer.run_name=run", "trainer.test_freq=0"]
        overrides += [f"trainer.total_training_steps={2 if smoke else 10}", "trainer.val_before_train=false"]
        command = [sys.executable, str(ROOT / "apps" / "ppo"), *overrides, *more]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = sorted(line["perf/driver_cpu_s"] / line["timing_s/step"] for line in lines if line["step"] > 1)
    return [
        verdict(
            "CPU time of the driver, share of a step of the demo",
            shares[len(shares) // 2],
            0.05,
            0.03,
            at_least=False,
            seconds_per_step=sorted(line["timing_s/step"] for line in lines)[len(lines) // 2],
            driver_bytes=max(line["perf/driver_bytes"] for line in lines),
        )
    ]


def learning(names: list[str], seeds: list[str], steps: int) -> None:
    """Run the demo task with each combination; writes JSON and curves."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            estimator, _, loss = name.partition(":")
            for seed in seeds:
                overrides = [
                    f"algorithm.adv_estimator={estimator}",
                    f"actor.policy_loss.loss_mode={loss}",
                    *COMBINATIONS[name],
                    f"trainer.seed={seed}",
                    *([f"trainer.total_training_steps={steps}"] if steps else []),
                ]
                rows.append(run("grpo", overrides, Path(folder)) | {"algorithm": name, "overrides": [f"seed={seed}"]})
                print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
    path = write_result("trainer_learning", command_line(), rows)
    plot(rows, path.with_suffix(".png"))
    print(path)


def main() -> None:
    """Run the chosen measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="throughput,packed,driver")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--combinations", default=",".join(COMBINATIONS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the app's default")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another override of the app's run (driver)"
    )
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if arguments.only == "learning":
        learning(arguments.combinations.split(","), arguments.seeds.split(","), arguments.steps)
        return
    pairs, smoke = 2 if arguments.smoke else arguments.pairs, arguments.smoke
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), smoke=smoke)
        questions: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "throughput": lambda: throughput(path, pairs, smoke=smoke),
            "packed": lambda: packed(path, pairs, smoke=smoke),
            "driver": lambda: driver(arguments.set, smoke=smoke),
        }
        for name in arguments.only.split(","):
            rows += questions[name]()
    if not arguments.smoke:
        publish("trainer_" + "_".join(arguments.only.split(",")), rows)


if __name__ == "__main__":
    main()
