"""Generation by `HFRolloutEngine`, transformers' `generate` and the bare loop, side by side.

All sides sample at temperature 1 from one model folder, each prompt n times, until the end of
sequence or the largest length. Ours also returns the log-probs of the tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.bare_grpo import BareGRPO
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harness.grpo_cells import CELLS, SMOKE, Cell, base_model, task_of
from harness.pairs import Subject, Timing, take_turns, verdict
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer.rollout.hf_engine import HFRolloutEngine

THREADS = 2
GENERATION_CELLS: Mapping[str, Cell] = {
    name: CELLS[name]
    for name in ("0.33M-4", "0.33M-64-ragged", "27M-64-equal", "27M-64-ragged", "27M-256-ragged", "110M-64-ragged")
}


def compare_generation(names: Sequence[str], pairs: int) -> list[dict[str, Any]]:
    """One row per cell.

    Args:
        names: keys of GENERATION_CELLS; none: only a tiny cell.
        pairs: turns of each side, after one that warms up.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    chosen = {name: GENERATION_CELLS[name] for name in names} or {"smoke": SMOKE}
    return [_row(name, cell, pairs) for name, cell in chosen.items()]


def _row(name: str, cell: Cell, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        sides = _sides(cell, base_model(cell, Path(temporary)))
        made: dict[str, list[int]] = {side: [] for side in sides}
        subjects = [Subject(side, lambda side=side: made[side].append(sides[side]()), [os.getpid()]) for side in sides]
        timings = take_turns(subjects, pairs, warm_up=1)
    tokens = {side: counts[-pairs:] for side, counts in made.items()}
    must, aim = (1.5, 3.0) if cell.ragged else (1.1, 1.5)

    def times(peer: str, of: Callable[[Timing], float]) -> list[float]:
        """Tokens of ours per unit of that, to those of the peer, in each pair."""
        rates = {
            side: [n / of(timing) for n, timing in zip(tokens[side], timings[side], strict=True)] for side in sides
        }
        return [a / b for a, b in zip(rates["ours"], rates[peer], strict=True)]

    return verdict(
        f"generation, {name}: tokens/s against transformers' generate",
        median(times("generate", lambda timing: timing.wall)),
        must,
        aim,
        at_least=True,
        ratios=times("generate", lambda timing: timing.wall),
        cpu_ratio=median(times("generate", lambda timing: timing.cpu)),
        ratio_to_bare_loop=median(times("bare loop", lambda timing: timing.wall)),
        cpu_ratio_to_bare_loop=median(times("bare loop", lambda timing: timing.cpu)),
        figures={side: _figures(tokens[side], timings[side]) for side in sides},
        responses=cell.prompts * cell.n,
        threads=THREADS,
    )


def _figures(tokens: Sequence[int], timings: Sequence[Timing]) -> dict[str, float]:
    """Medians of one side."""
    runs = list(zip(tokens, timings, strict=True))
    return {
        "tokens": median(tokens),
        "tokens_per_s": round(median(n / timing.wall for n, timing in runs), 1),
        "cpu_s_per_1000_tokens": float(f"{median(timing.cpu / n * 1000 for n, timing in runs):.4g}"),
        "wall_s": float(f"{median(timing.wall for timing in timings):.4g}"),
    }


def _sides(cell: Cell, folder: Path) -> dict[str, Callable[[], int]]:
    """Each generates the cell's batch, with other random numbers at each call, and returns the
    number of tokens."""
    task = replace(task_of(cell, folder, steps=1, seed=0), kl_coef=0.0)  # the bare loop needs no reference
    bare = BareGRPO(task)
    prompts = bare.tokenizer([prompt for prompt, _ in task.train[: cell.prompts]])["input_ids"]
    ids = torch.tensor(prompts).repeat_interleave(cell.n, dim=0)
    engine = HFRolloutEngine(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos, pad = bare.tokenizer.eos_token_id, bare.tokenizer.pad_token_id
    seeds = iter(range(1 << 20))
    requests = [
        GenerationRequest(uid=f"{i}", session=session, prompt_ids=tuple(prompt))
        for i, prompt in enumerate(prompts)
        for session in range(cell.n)
    ]

    def ours() -> int:
        params = SamplingParams(max_new_tokens=cell.response_length, seed=next(seeds))
        return sum(len(one.response_ids) for one in asyncio.run(engine.generate(requests, params)))

    def generate() -> int:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=cell.response_length,
            pad_token_id=pad,
            eos_token_id=eos,
        )
        ends = (out[:, ids.shape[1] :] == eos).cumsum(-1)
        return int((ends - (out[:, ids.shape[1] :] == eos).long() == 0).sum())

    return {"ours": ours, "generate": generate, "bare loop": lambda: int(bare.generate(ids)[1].sum())}
