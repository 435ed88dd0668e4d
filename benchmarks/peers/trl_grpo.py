"""TRL's GRPOTrainer on a task, timed by stage; runs in an environment of its own with TRL.

    python -m peers.trl_grpo TASK.json LINES.jsonl   # in benchmarks/

TRL counts optimizer steps: one of our steps is `mini_batches` of its steps, for which it generates
once (`steps_per_generation`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging

from peers.grpo_task import StepLog, Task, score, warmed_up


class TimedGRPOTrainer(trl.GRPOTrainer):
    """Writes the seconds of each stage, and warms up the learning rate from step 1, not 0."""

    task: Task
    lines: StepLog
    lengths: list[int]
    prepared = 0.0
    """Seconds of this step outside its mini-batches."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        del num_training_steps
        if self.lr_scheduler is None:
            warmup = self.task.lr_warmup_steps
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: warmed_up(step + 1, warmup))
        return self.lr_scheduler

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = super()._generate_single_turn(*given, **named)
        self.lines.add("gen", start)
        self.lengths = [len(ids) for ids in out[0]]
        return out

    def _get_per_token_logps_and_entropies(self, model: Any, *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = super()._get_per_token_logps_and_entropies(model, *given, **named)
        if not torch.is_grad_enabled():
            self.lines.add("ref" if model is self.ref_model else "old_log_prob", start)
        return out

    def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = super()._calculate_rewards(*given, **named)
        self.lines.add("reward", start)
        return out

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        start = time.perf_counter()
        out = super()._prepare_inputs(generation_batch)
        self.prepared += time.perf_counter() - start
        return out


class Lines(TrainerCallback):
    """Writes a line at the end of each of our steps."""

    def __init__(self, trainer: TimedGRPOTrainer, tokenizer: Any) -> None:
        self.trainer, self.tokenizer = trainer, tokenizer
        self.begun = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        log, task = trainer.lines, trainer.task
        log.line(0, settings=settings(trainer), **log.validate(trainer.model, self.tokenizer, task, 0))
        self.begun = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        trainer = self.trainer
        log, task = trainer.lines, trainer.task
        step, left = divmod(state.global_step, task.mini_batches)
        if left:
            return
        log.add("step", self.begun)
        log.add("update_actor", self.begun + trainer.prepared)
        log.line(step, lengths=trainer.lengths, **log.validate(trainer.model, self.tokenizer, task, step))
        trainer.prepared, self.begun = 0.0, time.perf_counter()


def settings(trainer: TimedGRPOTrainer) -> dict[str, Any]:
    """What TRL runs with, read from its own objects; names as in `Task.settings`."""
    args, task = trainer.args, trainer.task
    group = trainer.optimizer.param_groups[0]  # pyright: ignore[reportOptionalMemberAccess]
    return {
        "prompts": args.generation_batch_size // args.num_generations,
        "n": args.num_generations,
        "rows_per_mini_batch": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "response_length": args.max_completion_length,
        "steps": args.max_steps // args.steps_per_generation,
        "lr": group["initial_lr"],
        "lr_warmup_steps": task.lr_warmup_steps,
        "betas": list(group["betas"]),
        "weight_decay": group["weight_decay"],
        "grad_clip": args.max_grad_norm,
        "clip": [args.epsilon, args.epsilon_high, args.delta],
        "kl_loss": ["k3", args.beta] if args.beta else None,
        "loss_agg_mode": {"bnpo": "token-mean"}[args.loss_type],
        "epochs": args.num_iterations,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "dtype": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "adamw": args.optim.value,
        "advantage_eps": 1e-4,
        "old_log_prob_pass": args.gradient_accumulation_steps % args.steps_per_generation != 0,
        "trl": version("trl"),
        "transformers": version("transformers"),
    }


def configured(task: Task, output: str) -> trl.GRPOConfig:
    """The same run in TRL's words; what is not named is TRL's default."""
    return trl.GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        seed=task.seed,
        shuffle_dataset=False,
        max_steps=task.steps * task.mini_batches,
        per_device_train_batch_size=task.rows // task.mini_batches,
        gradient_accumulation_steps=1,
        steps_per_generation=task.mini_batches,
        num_iterations=1,
        num_generations=task.n,
        max_completion_length=task.response_length,
        temperature=task.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=task.lr,
        adam_beta1=task.beta1,
        adam_beta2=task.beta2,
        weight_decay=task.weight_decay,
        max_grad_norm=task.grad_clip,
        epsilon=task.clip_low,
        epsilon_high=task.clip_high,
        delta=task.clip_c,
        beta=task.kl_coef,
        use_bias_correction_kl=False,
        loss_type="bnpo",
        scale_rewards="group",
        dataloader_pin_memory=False,
        logging_steps=task.mini_batches,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )


def main() -> None:
    """Train, and write one line per step."""
    task = Task.read(Path(sys.argv[1]))
    logging.disable_progress_bar()

    def reward(completions: list[str], truth: list[str], **_: Any) -> list[float]:
        return [score(task.reward, *pair) for pair in zip(completions, truth, strict=True)]

    with tempfile.TemporaryDirectory() as output:
        tokenizer = AutoTokenizer.from_pretrained(task.model)
        trainer = TimedGRPOTrainer(
            model=task.model,
            reward_funcs=reward,
            args=configured(task, output),
            train_dataset=Dataset.from_list([{"prompt": prompt, "truth": truth} for prompt, truth in task.train]),
            processing_class=tokenizer,
        )
        trainer.task, trainer.lines = task, StepLog(Path(sys.argv[2]))
        trainer.add_callback(Lines(trainer, tokenizer))
        trainer.train()


if __name__ == "__main__":
    main()
