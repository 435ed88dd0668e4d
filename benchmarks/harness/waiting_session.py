"""A kind of session whose responses arrive after a wait: `single_turn` with long-tailed latencies.

The app loads it as an installed package (`install`). It waits after its tokens were generated, as a
rollout engine on other hardware would take its time, so the waits cost no CPU here.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl_trainer.data import PromptRow
from rl_trainer.rollout.session_turns import Generate, SessionKind, Trajectory

NAME = "waiting"
MEDIAN, SIGMA, SEED = "RL_BENCH_LATENCY_MEDIAN_S", "RL_BENCH_LATENCY_SIGMA", "RL_BENCH_LATENCY_SEED"
"""Environment variables with the parameters of the latencies."""
_responses = Counter[tuple[int, ...]]()


def latency(median_s: float, sigma: float, seed: int, prompt: Sequence[int], number: int) -> float:
    """Seconds that response `number` to a prompt takes: lognormal, the same in every run."""
    text = f"{seed}/{number}/{','.join(map(str, prompt))}"
    return median_s * random.Random(text).lognormvariate(0.0, sigma)


def longest(sigma: float, responses: int, batches: int = 2000) -> float:
    """Mean over batches of the longest of `responses` latencies, in medians."""
    draw = random.Random(0)
    return statistics.mean(max(draw.lognormvariate(0.0, sigma) for _ in range(responses)) for _ in range(batches))


async def _run(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
    number = _responses[row.prompt_ids]
    _responses[row.prompt_ids] += 1
    generation = await generate(row.prompt_ids)
    median, sigma, seed = float(os.environ[MEDIAN]), float(os.environ[SIGMA]), int(os.environ[SEED])
    await asyncio.sleep(latency(median, sigma, seed, row.prompt_ids, number))
    return [Trajectory.of(generation)]


SESSION = SessionKind(_run)


def install(folder: Path, median_s: float, sigma: float, seed: int) -> dict[str, str]:
    """Offer the session as an installed package in a folder; returns the environment to use it."""
    info = folder / "waiting_session-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-session\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rl_trainer.sessions]\n{NAME} = {__name__}:SESSION\n")
    allowed = folder / "plugins.toml"
    allowed.write_text(f'[rl_trainer.sessions.{NAME}]\ndistribution = "waiting-session"\n')
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "RL_PLUGINS": str(allowed),
        MEDIAN: str(median_s),
        SIGMA: str(sigma),
        SEED: str(seed),
    }
