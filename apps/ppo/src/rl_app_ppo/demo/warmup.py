"""The supervised warm-up that makes a base model, which knows a task but prefers a careless answer.

Shapes: N problems of a split, B problems of a batch, P prompt tokens, A response tokens (turns with
their ends of sequence, observations, padding).
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

from rl_app_ppo.demo.addition import Problem
from rl_app_ppo.demo.cache import UNFINISHED, entry_path, is_whole, publish
from rl_app_ppo.demo.demos import DEMOS, Demo, Piece
from rl_app_ppo.demo.model import build_tokenizer, fresh_model
from rl_app_ppo.demo.prompts import prompt_ids
from rl_app_ppo.demo.settings import WarmUpSettings, content_hash
from rl_app_ppo.demo.tokenizer import EOS_ID, PAD_ID
from rl_protocol.support.temporary_folders import sweep
from rl_trainer.data.chat_template import PromptEncoder

__all__ = [
    "OnStep",
    "RightAnswers",
    "WarmUpResult",
    "cached_base_model",
    "content_hash",
    "right_answers",
    "warm_up",
]

NOT_TAUGHT = -100
"""Label of a token without loss."""
OnStep = Callable[[int, int, float, float | None], None]
"""on_step(steps done, most steps, loss in nats per taught token, validation accuracy or None)."""


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """The result of a warm-up."""

    model: Qwen2ForCausalLM
    """In evaluation mode."""
    accuracy: float
    """Share of validation problems that greedy generation solves."""


def warm_up(settings: WarmUpSettings, on_step: OnStep | None = None) -> WarmUpResult:
    """Train a base model.

    The result depends only on the settings, the library versions and the number of torch threads.
    The warm-up ends early at `settings.target_probability`, so that models of fast and slow seeds
    are equally ready for reinforcement learning.
    """
    demo, sizes = DEMOS[settings.demo], {"train_size": settings.train_size, "validation_size": settings.validation_size}
    split = demo.make_split(settings.data_seed, **sizes)
    tokenizer = build_tokenizer(demo.vocabulary, demo.template)
    targets = _Targets.encode(tokenizer, demo, split.train)
    probe = split.train[: settings.validation_size]
    model = fresh_model(settings.model, settings.seed, len(demo.vocabulary)).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
    )
    draw = np.random.Generator(np.random.Philox(key=settings.seed))
    accuracy = 0.0
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / settings.lr_warmup_steps)
        prompts, responses = targets.draw(draw, settings)
        loss = _train_step(model, optimizer, prompts, responses, settings.grad_clip)
        check = step == settings.max_steps or step % settings.check_every == 0
        done = check and right_answers(model, tokenizer, probe, demo).probability >= settings.target_probability
        if check:
            accuracy = right_answers(model, tokenizer, split.validation, demo).greedy
        if on_step is not None:
            on_step(step, settings.max_steps, loss, accuracy if check else None)
        if done:
            break
    return WarmUpResult(model=model.eval(), accuracy=accuracy)


@dataclass(frozen=True, slots=True)
class RightAnswers:
    """How well a model solves some problems."""

    greedy: float
    """Share of the problems that greedy generation solves."""
    probability: float
    """Mean probability of the right answer when sampling at temperature 1."""


@torch.no_grad()
def right_answers(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    demo: Demo = DEMOS["addition"],
) -> RightAnswers:
    """Measure a model in one forward pass.

    Greedy generation yields a response if and only if the model, given the response, prefers each
    of its taught tokens.
    """
    prompts = _prompts(tokenizer, demo, problems)
    responses = _Responses.encode(tokenizer, [demo.right(p) for p in problems])
    logits, taught = _response_logits(model, prompts, responses.tokens), responses.taught
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, responses.tokens[..., None]).squeeze(-1)
    return RightAnswers(
        greedy=((logits.argmax(-1) == responses.tokens) | ~taught).all(-1).double().mean().item(),
        probability=(chosen * taught).sum(-1).exp().mean().item(),
    )


@dataclass(frozen=True, slots=True)
class _Responses:
    """The tokens after the prompts."""

    tokens: torch.Tensor
    """[N, A] int64."""
    taught: torch.Tensor
    """[N, A] bool: tokens with a loss; the others are observations and padding."""

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerFast, responses: Sequence[Sequence[Piece]]) -> _Responses:
        rows = [
            [(ids, not piece.observed) for piece in pieces for ids in _ids(tokenizer, piece)] for pieces in responses
        ]
        width = max(map(len, rows))
        padded = [row + [(PAD_ID, False)] * (width - len(row)) for row in rows]
        return cls(
            tokens=torch.tensor([[token for token, _ in row] for row in padded]),
            taught=torch.tensor([[taught for _, taught in row] for row in padded]),
        )

    def wider(self, width: int) -> _Responses:
        """The same responses, padded to `width` tokens."""
        more = (0, width - self.tokens.shape[1])
        return _Responses(functional.pad(self.tokens, more, value=PAD_ID), functional.pad(self.taught, more))


@dataclass(frozen=True, slots=True)
class _Targets:
    """The data from which the warm-up draws batches."""

    prompts: torch.Tensor
    """[N, P] int64."""
    right: _Responses
    careless: _Responses
    """As wide as `right`."""

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerFast, demo: Demo, problems: Sequence[Problem]) -> _Targets:
        right = _Responses.encode(tokenizer, [demo.right(p) for p in problems])
        careless = _Responses.encode(tokenizer, [demo.careless(p) for p in problems])
        width = max(right.tokens.shape[1], careless.tokens.shape[1])
        return cls(_prompts(tokenizer, demo, problems), right.wider(width), careless.wider(width))

    def draw(self, draw: np.random.Generator, settings: WarmUpSettings) -> tuple[torch.Tensor, _Responses]:
        """Draw prompts [B, P] and responses [B, A], of which `careless_share` are careless."""
        rows = torch.from_numpy(draw.integers(0, len(self.prompts), settings.batch_size))
        careless = torch.from_numpy(draw.random(settings.batch_size) < settings.careless_share)[:, None]
        return self.prompts[rows], _Responses(
            torch.where(careless, self.careless.tokens[rows], self.right.tokens[rows]),
            torch.where(careless, self.careless.taught[rows], self.right.taught[rows]),
        )


def cached_base_model(cache_dir: Path, settings: WarmUpSettings, on_step: OnStep | None = None) -> Path:
    """Folder of the base model and its tokenizer, from the cache or trained now.

    The entry's manifest has its accuracy: `cache.read_facts(path)["accuracy"]`.
    """
    entry = entry_path(cache_dir, settings)
    sweep(UNFINISHED, cache_dir)
    if is_whole(entry):
        return entry

    def fill(folder: Path) -> dict[str, object]:
        result = warm_up(settings, on_step)
        with _no_progress_bars():
            result.model.save_pretrained(folder)
        demo = DEMOS[settings.demo]
        build_tokenizer(demo.vocabulary, demo.template).save_pretrained(folder)
        return {"accuracy": result.accuracy, "content_hash": content_hash(settings)}

    publish(entry, fill)
    return entry


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Disable the progress bars of transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _prompts(tokenizer: PreTrainedTokenizerFast, demo: Demo, problems: Sequence[Problem]) -> torch.Tensor:
    """[B, P] int64 ids of the prompts, which have equal lengths."""
    return torch.tensor(
        prompt_ids(PromptEncoder(tokenizer.backend_tokenizer, demo.template, tools=demo.tools), problems)
    )


def _ids(tokenizer: PreTrainedTokenizerFast, piece: Piece) -> list[int]:
    """Token ids of a piece of a response."""
    ids = tokenizer.encode(piece.text)
    return ids if piece.observed else [*ids, EOS_ID]


def _response_logits(model: Qwen2ForCausalLM, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Logits of each response token, [B, A, vocabulary]."""
    tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
    return model(input_ids=tokens, use_cache=False).logits[:, prompts.shape[1] - 1 :]


def _train_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: torch.Tensor,
    responses: _Responses,
    grad_clip: float,
) -> float:
    """One optimizer step; returns the loss before it, nats per taught token."""
    logits = _response_logits(model, prompts, responses.tokens)
    labels = responses.tokens.masked_fill(~responses.taught, NOT_TAUGHT)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_TAUGHT)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return loss.item()
