"""What a GRPO run trains on and how, read by every side of `bench_against_trl.py`.

Imports nothing of ours: it also runs in the environment of TRL.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ACCURACY = "val-core/two_digit_addition/acc/mean@1"
"""Name of the validation accuracy in the lines of every side."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One GRPO run."""

    model: str
    """Folder of the base model and its tokenizer; all prompts are of equal length."""
    train: Sequence[tuple[str, str]]
    """Prompt and truth of each group, in the order of training."""
    validation: Sequence[tuple[str, str]]
    """Problems that greedy generation is measured on; empty: none."""
    reward: str
    """`exact_match`, or `last_number`: the last number of the response is the truth."""
    steps: int
    prompts: int
    """Prompts per step."""
    n: int
    """Responses per prompt."""
    mini_batches: int
    """Optimizer steps per step."""
    response_length: int
    test_freq: int
    lr: float
    lr_warmup_steps: int
    """Optimizer steps."""
    kl_coef: float
    """Weight of k3 in the loss; 0: no reference model."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float = 3.0
    """Dual clip."""
    temperature: float = 1.0
    seed: int = 0

    @property
    def rows(self) -> int:
        """Responses per step."""
        return self.prompts * self.n

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def settings(self) -> dict[str, Any]:
        """The settings that must be equal on all sides, by name."""
        return {
            "prompts": self.prompts,
            "n": self.n,
            "rows_per_mini_batch": self.rows // self.mini_batches,
            "response_length": self.response_length,
            "steps": self.steps,
            "lr": self.lr,
            "lr_warmup_steps": self.lr_warmup_steps,
            "betas": [self.beta1, self.beta2],
            "weight_decay": self.weight_decay,
            "grad_clip": self.grad_clip,
            "clip": [self.clip_low, self.clip_high, self.clip_c],
            "kl_loss": ["k3", self.kl_coef] if self.kl_coef else None,
            "loss_agg_mode": "token-mean",
            "epochs": 1,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": self.seed,
            "dtype": "float32",
            "torch": torch.__version__,
        }


def score(reward: str, response: str, truth: str) -> float:
    """1 for a right response, else 0; as our `exact_match` and `gsm8k_flexible` score."""
    if reward == "exact_match":
        return float(response == truth)
    numbers = [number for number in re.findall(r"-?[0-9.,]+", response[-300:]) if number != "."]
    return float(bool(numbers) and numbers[-1] == truth)


def warmed_up(step: int, warmup: int) -> float:
    """Fraction of the learning rate at optimizer step `step` (the first is 1)."""
    return min(1.0, step / warmup) if warmup else 1.0


@torch.no_grad()
def greedy_accuracy(model: Any, tokenizer: Any, task: Task) -> float:
    """Share of the validation problems that greedy generation solves."""
    ids = torch.tensor(tokenizer([prompt for prompt, _ in task.validation])["input_ids"])
    training = model.training
    model.eval()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=task.response_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.train(training)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [score(task.reward, text, truth) for text, (_, truth) in zip(texts, task.validation, strict=True)]
    return sum(right) / len(right)


class StepLog:
    """Writes one JSON line per step: seconds by stage, lengths of responses, accuracy."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._seconds: dict[str, float] = {}

    def add(self, stage: str, since: float) -> None:
        """Add the time since then, of `time.perf_counter`, to a stage of this step."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - since

    def line(self, step: int, **more: Any) -> None:
        """Write the line of a step, and begin the next one."""
        seconds = {f"timing_s/{stage}": value for stage, value in self._seconds.items()}
        self._file.write(json.dumps({"step": step, **seconds, **more}) + "\n")
        self._file.flush()
        self._seconds = {}

    def validate(self, model: Any, tokenizer: Any, task: Task, step: int) -> Mapping[str, float]:
        """Measure the accuracy if it is due at this step."""
        due = step in (0, task.steps) or (task.test_freq and step % task.test_freq == 0)
        if not (task.validation and due):
            return {}
        start = time.perf_counter()
        accuracy = greedy_accuracy(model, tokenizer, task)
        self.add("testing", start)
        return {ACCURACY: accuracy}
