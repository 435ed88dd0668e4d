"""The cells of `bench_against_trl.py`: models made on the spot, problems, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peers.grpo_task import Task
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.demo.addition import make_split
from rl_app_ppo.demo.model import build_tokenizer
from rl_app_ppo.demo.settings import WarmUpSettings
from rl_app_ppo.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK, VOCABULARY
from rl_app_ppo.demo.warmup import cached_base_model
from rl_trainer.data.prompt_order import PromptOrder

CACHE = Path("~/.cache/rl-app-ppo").expanduser()
"""The app's cache of base models."""
LETTERS = tuple("abcdefghijklmnop")
"""More tokens of the random models, so that their responses have many short numbers."""
NEVER = -30.0
"""Logit of a token that is never sampled."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison.

    Attributes:
        size: key of SHAPES.
        response_length: largest number of tokens of a response.
        ragged: responses end with probability 2 / response_length after each token; otherwise all
            have the full length.
        prompts: per step.
        n: responses per prompt.
        kl: with a KL term in the loss.
        demo: the demo of the app: its base model, 30 steps, validation.
        mini_batches: optimizer steps per step.
    """

    size: str
    response_length: int
    ragged: bool = False
    prompts: int = 16
    n: int = 8
    kl: bool = True
    demo: bool = False
    mini_batches: int = 4


SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "0.03M": (32, 64, 2, 2),
    "0.33M": (128, 256, 2, 4),
    "27M": (512, 1536, 8, 8),
    "110M": (768, 3072, 12, 12),
}
"""Hidden size, intermediate size, layers, heads."""
CELLS: Mapping[str, Cell] = {
    "0.33M-4": Cell(size="0.33M", response_length=4, prompts=64, demo=True),
    "0.33M-64-ragged": Cell(size="0.33M", response_length=64, prompts=64, ragged=True),
    "27M-64-equal": Cell(size="27M", response_length=64),
    "27M-64-ragged": Cell(size="27M", response_length=64, ragged=True),
    "27M-256-ragged": Cell(size="27M", response_length=256, ragged=True, prompts=4),
    "110M-64-equal": Cell(size="110M", response_length=64, prompts=4),
    "110M-64-ragged": Cell(size="110M", response_length=64, ragged=True, prompts=4),
    "27M-64-equal-no-kl": Cell(size="27M", response_length=64, kl=False),
    "27M-64-equal-n16": Cell(size="27M", response_length=64, prompts=8, n=16),
}
SMOKE = Cell(size="0.03M", response_length=8, ragged=True, prompts=4, n=4, mini_batches=2)


def bars(cell: Cell) -> Mapping[str, tuple[float, float]]:
    """What is at most asked of ours, must and aim: seconds against floor and TRL, CPU seconds."""
    small = cell.size == "0.33M"
    trl = (0.7, 0.5) if small or cell.ragged else (0.9, 0.75)
    return {"floor": (1.15, 1.0), "trl": trl, "cpu": (0.8, 0.6) if small else (1.0, 0.8)}


def base_model(cell: Cell, folder: Path) -> Path:
    """Folder of the cell's model: the demo's in the cache, or a random one, written to `folder`."""
    return cached_base_model(CACHE, WarmUpSettings()) if cell.demo else make_model(cell, folder)


def task_of(cell: Cell, model: Path, steps: int, seed: int) -> Task:
    """The task of a cell; the seed decides the order of problems, as in the app, and samples."""
    settings = WarmUpSettings()
    split = make_split(settings.data_seed, train_size=settings.train_size, validation_size=settings.validation_size)
    order = PromptOrder(len(split.train), cell.prompts, seed)
    problems = [split.train[row] for step in range(steps) for row in order.rows(step)]
    common = Task(
        model=str(model),
        train=[(problem.prompt, problem.answer) for problem in problems],
        validation=[(problem.prompt, problem.answer) for problem in split.validation],
        reward="exact_match",
        steps=steps,
        prompts=cell.prompts,
        n=cell.n,
        mini_batches=cell.mini_batches,
        response_length=cell.response_length,
        test_freq=5,
        lr=4e-4,
        lr_warmup_steps=16,
        kl_coef=0.001 if cell.kl else 0.0,
        seed=seed,
    )
    if cell.demo:
        return common
    digits = [(prompt, str(i % 10)) for i, (prompt, _) in enumerate(common.train)]
    return replace(common, train=digits, validation=[], reward="last_number", test_freq=0, lr=1e-6)


def make_model(cell: Cell, folder: Path) -> Path:
    """Write a random Qwen2 with a tokenizer; returns the folder.

    Its end of sequence has the same probability after each token, so that the lengths of responses
    have the same distribution whatever samples from it: place 0 of the residual stream is constant
    (no layer writes it), and only there does the end of sequence differ from other tokens.
    """
    vocabulary = (*VOCABULARY, *LETTERS)
    model = _random_model(cell, len(vocabulary))
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(vocabulary)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        ids = torch.tensor([tokenizer.encode("37+45=280abc")])
        constant = float(model.model(input_ids=ids).last_hidden_state[..., 0].mean())
        head = model.lm_head.weight
        head[:, 0] = 0.0
        for token in (PAD_ID, BOS_ID, vocabulary.index(UNK), EOS_ID):
            head[token] = 0.0
            head[token, 0] = NEVER / constant
        if cell.ragged:
            share = 2 / cell.response_length
            others = len(vocabulary) - 4
            head[EOS_ID, 0] = math.log(share / (1 - share) * others) / constant
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _random_model(cell: Cell, vocabulary: int) -> Qwen2ForCausalLM:
    hidden, intermediate, layers, heads = SHAPES[cell.size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()
