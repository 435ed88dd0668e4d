"""Measure what hostile reward samples cost the reward worker.

    uv run benchmarks/bench_rewards.py [--samples N] [--share 0.01] [--cost-ms MS] [--timeout-s S]
        [--workers N] [--pairs N] [--smoke]

Hostile samples loop forever, fork, allocate 10 GiB, raise, or return None, NaN or a string. The
worker scores batches with a share of them in turns with batches without, with a function that
takes `cost-ms` of CPU for an honest sample. The figure is honest samples scored per second until
the last outcome of the batch: a call that never returns counts with its whole limit, so a batch
must take long against `timeout-s`, as in training. The same is measured without giving up late
calls (`function_pool.MOST_LATE` 0). One worker by default: it has processors to spare, as in
training.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.pairs import publish, verdict

from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.rewards import ScorerPool, function_pool
from rl_trainer.workers.messages import StageCall

KINDS = ("loop", "fork", "memory", "raise", "none", "nan", "text")
FUNCTION = """
import os, time
COST_S = float(os.environ["BENCH_REWARD_COST_S"])
def score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "honest":
            end = time.process_time() + COST_S
            while time.process_time() < end: pass
            return 1.0
        case "loop":
            while True: pass
        case "fork":
            os.fork()
            while True: time.sleep(1)
        case "memory": return float(len(bytearray(10 * 2**30)))
        case "raise": raise RuntimeError("on purpose")
        case "none": return None
        case "nan": return float("nan")
        case "text": return "0.5"
"""


def manners(samples: int, share: float) -> list[str]:
    """[samples] the behavior of each: hostile ones at equal distances, each kind in turn."""
    hostile = round(samples * share)
    out = ["honest"] * samples
    for i in range(hostile):
        out[int((i + 0.5) * samples / hostile)] = KINDS[i % len(KINDS)]
    return out


class Bench:
    """A reward worker over one pool, and its batches."""

    def __init__(self, scorer: ScorerPool) -> None:
        self._plane = MemoryDataPlane()
        self._manners: list[str] = []
        algorithm = AlgorithmConfig()
        self._worker = RewardWorker(
            self._plane,
            step_columns(algorithm, ActorConfig()),
            scorer,
            lambda ids: self._manners[ids[0]],
            RewardSettings(algorithm=algorithm, response_length=4),
        )
        self._batches = 0

    async def rate(self, wanted: Sequence[str]) -> float:
        """Honest samples scored per second of one batch.

        Raises:
            RuntimeError: not exactly the hostile samples failed.
        """
        self._manners = list(wanted)
        self._batches += 1
        partition = f"train{self._batches}"
        facts = {name: ObjectColumn.from_values([value]) for name, value in FACTS.items()}
        await self._plane.put(
            prompt_partition(partition), ["p"], BatchData({"prompts": ragged([[0]], "int64"), **facts})
        )
        keys = [f"p/{i}/0" for i in range(len(wanted))]
        data = BatchData({"responses": ragged([[i] for i in range(len(wanted))], "int64")})
        batch = (await self._plane.put(partition, keys, data)).without_tags()
        start = time.perf_counter()
        result = await self._worker.reward(batch, StageCall(step=1, batch=batch))
        seconds = time.perf_counter() - start
        if set(result.failed) != {key for key, how in zip(keys, wanted, strict=True) if how != "honest"}:
            raise RuntimeError(f"{len(result.failed)} samples failed, which are not the hostile ones")
        return wanted.count("honest") / seconds


FACTS: dict[str, Any] = {"data_source": "s", "ground_truth": "", "extra_info": {}}


async def losses(path: Path, args: argparse.Namespace, most_late: int) -> dict[str, Any]:
    """Share of the throughput lost, by pairs of batches, with `late` late calls per worker."""
    function_pool.MOST_LATE = most_late
    scorer = await ScorerPool.open(f"{path}:score", workers=args.workers, timeout_s=args.timeout_s, memory_mb=2048)
    clean, hostile = ["honest"] * args.samples, manners(args.samples, args.share)
    try:
        bench, pairs = Bench(scorer), list[tuple[float, float]]()
        await bench.rate(clean[: max(len(clean) // 10, 2)])  # the first calls fault their memory in
        for turn in range(args.pairs):
            order = (clean, hostile) if turn % 2 else (hostile, clean)
            rates = {id(batch): await bench.rate(batch) for batch in order}
            pairs.append((rates[id(clean)], rates[id(hostile)]))
    finally:
        await scorer.close()
    lost = [1 - b / a for a, b in pairs]
    return {
        "lost": statistics.median(lost),
        "lost_of_pairs": [float(f"{one:.3g}") for one in lost],
        "honest_per_s": float(f"{statistics.median(a for a, _ in pairs):.4g}"),
        "honest_per_s_with_hostile": float(f"{statistics.median(b for _, b in pairs):.4g}"),
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024, help="of a batch")
    parser.add_argument("--share", type=float, default=0.01, help="of them that are hostile")
    parser.add_argument("--cost-ms", type=float, default=20.0, help="processor time of an honest sample")
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny, and nothing is written")
    args = parser.parse_args()
    if args.smoke:
        args.samples, args.share, args.cost_ms, args.timeout_s, args.pairs = 100, 0.07, 1.0, 1.2, 1
    logging.getLogger("rl_trainer").setLevel(logging.ERROR)  # each failure is said there
    os.environ["BENCH_REWARD_COST_S"] = str(args.cost_ms / 1000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hostile.py")
        path.write_text(FUNCTION)
        os.environ.update(variables_for(given_files([path], "trust")))
        ours = asyncio.run(losses(path, args, function_pool.MOST_LATE))
        kept = asyncio.run(losses(path, args, 0))
    facts = {"samples": args.samples, "share": args.share, "cost_ms": args.cost_ms, "timeout_s": args.timeout_s}
    rows = [
        verdict(
            f"rewards: throughput lost to {args.share:.0%} hostile samples",
            ours.pop("lost"),
            0.10,
            0.05,
            at_least=False,
            workers=args.workers,
            lost_where_late_calls_keep_their_turn=float(f"{kept['lost']:.3g}"),
            **facts,
            **ours,
        )
    ]
    print(rows[0])
    if not args.smoke:
        publish("rewards", rows)


if __name__ == "__main__":
    main()
