"""The supervised warm-up: from fresh weights to a base model that adds, and forgets to carry.

Shapes: N problems of a split, B problems of a batch, P prompt tokens, A answer tokens (the digits and the end of sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils import logging

from rl_app_ppo.demo.arithmetic import Problem, careless_answer, make_split
from rl_app_ppo.demo.model import fresh_model
from rl_app_ppo.demo.settings import WarmUpSettings, content_hash
from rl_app_ppo.demo.store import is_whole, publish
from rl_app_ppo.demo.tokenizer import build_tokenizer
from rl_app_ppo.demo.vocabulary import EOS_ID

__all__ = [
    "OnStep",
    "RightAnswers",
    "WarmUpResult",
    "cached_base_model",
    "content_hash",
    "entry_path",
    "right_answers",
    "warm_up",
]

OnStep = Callable[[int, int, float, float | None], None]
"""on_step(steps done, steps in all, loss in nats per answer token, validation accuracy where it was measured)."""


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """What a warm-up made."""

    model: Qwen2ForCausalLM
    """In evaluation mode."""
    accuracy: float
    """Share of the validation problems that greedy generation answers exactly."""


def warm_up(settings: WarmUpSettings, on_step: OnStep | None = None) -> WarmUpResult:
    """Train a base model. The result depends on the settings, the library versions and the number of torch threads alone.

    It ends early once the model gives the right answers to training problems `settings.target_probability`, so that models
    from quick and from slow seeds are equally ready for reinforcement learning.
    """
    split = make_split(settings.data_seed, train_size=settings.train_size, validation_size=settings.validation_size)
    tokenizer = build_tokenizer()
    targets = _Targets.encode(tokenizer, split.train)
    probe = split.train[: settings.validation_size]
    model = fresh_model(settings.model, settings.seed).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
    )
    draw = np.random.Generator(np.random.Philox(key=settings.seed))
    accuracy = 0.0
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / settings.lr_warmup_steps)
        prompts, answers = targets.draw(draw, settings)
        loss = _train_step(model, optimizer, prompts, answers, settings.grad_clip)
        check = step == settings.max_steps or step % settings.check_every == 0
        done = check and right_answers(model, tokenizer, probe).probability >= settings.target_probability
        if check:
            accuracy = right_answers(model, tokenizer, split.validation).greedy
        if on_step is not None:
            on_step(step, settings.max_steps, loss, accuracy if check else None)
        if done:
            break
    return WarmUpResult(model=model.eval(), accuracy=accuracy)


@dataclass(frozen=True, slots=True)
class RightAnswers:
    """How a model stands to the right answers of some problems."""

    greedy: float
    """Share of the problems that greedy generation answers exactly."""
    probability: float
    """Mean probability that sampling at temperature 1 gives the right answer."""


@torch.no_grad()
def right_answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> RightAnswers:
    """Measure a model in one forward pass.

    Greedy generation gives an answer exactly when, fed the answer, the model prefers each of its tokens in turn.
    """
    prompts = _encode(tokenizer, [p.prompt for p in problems])
    answers = _encode_answers(tokenizer, [p.answer for p in problems])
    logits = _answer_logits(model, prompts, answers)
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, answers[..., None]).squeeze(-1)
    return RightAnswers(
        greedy=(logits.argmax(-1) == answers).all(-1).double().mean().item(),
        probability=chosen.sum(-1).exp().mean().item(),
    )


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the warm-up draws its batches from."""

    prompts: torch.Tensor
    """[N, P] int64."""
    right: torch.Tensor
    """[N, A] int64."""
    careless: torch.Tensor
    """[N, A] int64."""

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> _Targets:
        return cls(
            prompts=_encode(tokenizer, [p.prompt for p in problems]),
            right=_encode_answers(tokenizer, [p.answer for p in problems]),
            careless=_encode_answers(tokenizer, [careless_answer(p) for p in problems]),
        )

    def draw(self, draw: np.random.Generator, settings: WarmUpSettings) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts [B, P] and answers [B, A], each answer careless with probability `settings.careless_share`."""
        rows = torch.from_numpy(draw.integers(0, len(self.prompts), settings.batch_size))
        careless = torch.from_numpy(draw.random(settings.batch_size) < settings.careless_share)
        return self.prompts[rows], torch.where(careless[:, None], self.careless[rows], self.right[rows])


def entry_path(cache_dir: Path, settings: WarmUpSettings) -> Path:
    """Where the base model of these settings is kept."""
    return cache_dir / f"base-{content_hash(settings)[:16]}"


def cached_base_model(cache_dir: Path, settings: WarmUpSettings, on_step: OnStep | None = None) -> Path:
    """Folder of the base model and its tokenizer, for `from_pretrained`; trained now unless it is in the cache, whole.

    The accuracy it starts from is in the entry's manifest: `store.read_facts(path)["accuracy"]`.
    """
    entry = entry_path(cache_dir, settings)
    if is_whole(entry):
        return entry

    def fill(folder: Path) -> dict[str, object]:
        result = warm_up(settings, on_step)
        with _no_progress_bars():
            result.model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return {"accuracy": result.accuracy, "content_hash": content_hash(settings)}

    publish(entry, fill)
    return entry


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Keep transformers from drawing on the terminal, which belongs to the caller."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """[B, P] int64 ids of texts of equal length."""
    return torch.tensor([tokenizer.encode(text) for text in texts])


def _encode_answers(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """[B, A] int64 ids of answers of equal length, each with its end of sequence."""
    return functional.pad(_encode(tokenizer, texts), (0, 1), value=EOS_ID)


def _answer_logits(model: Qwen2ForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """[B, A, vocabulary]: what the model thinks of each answer token, given all before it."""
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    return model(input_ids=tokens, use_cache=False).logits[:, prompts.shape[1] - 1 :]


def _train_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: torch.Tensor,
    targets: torch.Tensor,
    grad_clip: float,
) -> float:
    """One optimizer step; returns the loss before it, nats per answer token."""
    logits = _answer_logits(model, prompts, targets)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return loss.item()
