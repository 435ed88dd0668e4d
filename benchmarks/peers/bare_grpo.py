"""The bare floor: GRPO as a plain PyTorch loop in one process with all cores.

Generation with a KV cache, one pass of the reference model where there is a KL term, one forward
and backward pass per mini-batch. The log-probs of sampling are the old ones, so there is no pass
for them. Rows are rectangles; generation ends when every row has ended.

    python -m peers.bare_grpo TASK.json LINES.jsonl   # in benchmarks/
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from peers.grpo_task import StepLog, Task, score, warmed_up


def token_log_probs(model: Any, ids: torch.Tensor, start: int, temperature: float) -> torch.Tensor:
    """[B, T] log-probs of the tokens from place `start` on."""
    places = torch.arange(start - 1, ids.shape[1] - 1)
    logits = model(input_ids=ids, logits_to_keep=places, use_cache=False).logits / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None])[..., 0]


class BareGRPO:
    """Policy, reference and optimizer of one run."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tokenizer = AutoTokenizer.from_pretrained(task.model)
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval()
        self.reference = (
            AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval() if task.kl_coef else None
        )
        self.adam = torch.optim.AdamW(
            self.model.parameters(),
            lr=task.lr,
            betas=(task.beta1, task.beta2),
            weight_decay=task.weight_decay,
            fused=True,
        )
        self.updates = 0

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts with responses [B, P + T], mask [B, T] and log-probs [B, T] of the responses."""
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        cache, ids, fresh = DynamicCache(), [prompts], prompts
        running = torch.ones(len(prompts), dtype=torch.bool)
        masks, found = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(self.task.response_length):
            out = self.model(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
            log_p = torch.log_softmax(out.logits[:, -1] / self.task.temperature, -1)
            fresh = torch.multinomial(log_p.exp(), 1)
            found.append(log_p.gather(-1, fresh))
            fresh = fresh.masked_fill(~running[:, None], pad)
            masks.append(running[:, None])
            ids.append(fresh)
            running = running & (fresh[:, 0] != eos)
            if not running.any():
                break
        return torch.cat(ids, 1), torch.cat(masks, 1), torch.cat(found, 1)

    def advantages(self, texts: Sequence[str], truths: Sequence[str]) -> torch.Tensor:
        """[B] scores relative to those of the same prompt."""
        scores = torch.tensor([score(self.task.reward, *pair) for pair in zip(texts, truths, strict=True)])
        groups = scores.view(-1, self.task.n)
        return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()

    def update(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        old: torch.Tensor,
        reference: torch.Tensor | None,
        advantages: torch.Tensor,
    ) -> None:
        """One optimizer step on a mini-batch; [B, P + T], [B, T] or [B]."""
        task, a = self.task, advantages[:, None]
        self.adam.zero_grad()
        log_p = token_log_probs(self.model, ids, ids.shape[1] - mask.shape[1], task.temperature)
        ratio = (log_p - old).exp()
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - task.clip_low, 1 + task.clip_high))
        loss = torch.where(a < 0, torch.minimum(loss, -a * task.clip_c), loss)
        if reference is not None:
            d = log_p - reference
            loss = loss + task.kl_coef * (torch.expm1(-d) + d)
        (loss * mask).sum().div(mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.grad_clip)
        self.updates += 1
        for group in self.adam.param_groups:
            group["lr"] = task.lr * warmed_up(self.updates, task.lr_warmup_steps)
        self.adam.step()

    def step(self, problems: Sequence[tuple[str, str]], log: StepLog) -> list[int]:
        """One step on one prompt per group; returns the lengths of the responses in tokens."""
        task = self.task
        rows = [problem for problem in problems for _ in range(task.n)]
        start = time.perf_counter()
        prompts = torch.tensor(self.tokenizer([prompt for prompt, _ in rows])["input_ids"])
        ids, mask, old = self.generate(prompts)
        log.add("gen", start)
        start = time.perf_counter()
        texts = self.tokenizer.batch_decode(ids[:, prompts.shape[1] :], skip_special_tokens=True)
        advantages = self.advantages(texts, [truth for _, truth in rows])
        log.add("reward", start)
        reference = None
        if self.reference is not None:
            start = time.perf_counter()
            with torch.no_grad():
                reference = token_log_probs(self.reference, ids, prompts.shape[1], task.temperature)
            log.add("ref", start)
        start = time.perf_counter()
        for part in torch.randperm(len(ids)).chunk(task.mini_batches):
            self.update(
                ids[part],
                mask[part],
                old[part],
                None if reference is None else reference[part],
                advantages[part],
            )
        log.add("update_actor", start)
        return mask.sum(1).tolist()


def main() -> None:
    """Train, and write one line per step."""
    task, log = Task.read(Path(sys.argv[1])), StepLog(Path(sys.argv[2]))
    logging.disable_progress_bar()
    torch.manual_seed(task.seed)
    run = BareGRPO(task)
    more = {"threads": torch.get_num_threads(), "adamw": "fused", "advantage_eps": 1e-6, "old_log_prob_pass": False}
    log.line(0, settings=task.settings() | more, **log.validate(run.model, run.tokenizer, task, 0))
    for step in range(1, task.steps + 1):
        start = time.perf_counter()
        lengths = run.step(task.train[(step - 1) * task.prompts : step * task.prompts], log)
        log.add("step", start)
        log.line(step, lengths=lengths, **log.validate(run.model, run.tokenizer, task, step))


if __name__ == "__main__":
    main()
