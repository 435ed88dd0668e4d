"""Predict the gain of the data plane on N nodes, beside the gains verl PR #5401 published.

    uv run --directory benchmarks python -m ppo_step.scale_model RESULT.json ... [--nic 10]

RESULT.json: results of bench_controller_bottleneck.py with the planes driver and simple, without
compute, over several sizes (and worker counts). All sizes of 4 workers give the costs
(harness/scaling.py); every point is predicted from a fit without its size and compared with the
measurement. The worst of these errors is the error bar of the six published runs; above 20 %
nothing is predicted. The bar does not cover that these runs move far more bytes, nor the
assumptions about them that were not published (ASSUMED, PUBLISHED and scaling.Gpu: bytes per image
token, lengths of prompts and responses, model speed). Costs per byte are those of this machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.pairs import publish
from harness.result_schema import load
from harness.scaling import (
    GIB,
    Costs,
    Gpu,
    Sample,
    Spread,
    compute_s,
    fit,
    gain_bar_percent,
    gain_percent,
    network_s,
    spread,
)

from ppo_step.graph import MODEL_STAGES, SCORING_STAGES, step_graph
from ppo_step.payloads import FAMILIES, SESSIONS, Family

COMMAND = ("uv", "run", "--directory", "benchmarks", "python", "-m", "ppo_step.scale_model")
MOST_BAR_PERCENT = 20.0
"""A prediction with a larger error bar is not made."""
PLANES = {"driver": True, "simple": False}
"""Measured planes, and whether the bytes go through one process."""
ASSUMED = {
    "fill": 0.5,  # mean length of prompts and responses, of the longest allowed
    "ranks_per_node": 4,  # data-parallel ranks that move bytes at the same time
    "image_token_bytes": 4 * 1536 * 2,  # four patches of 1536 bfloat16 values
    "expert_token_bytes": 48 * 8,  # one byte for each of 8 experts in 48 layers
}


H100 = Gpu()


@dataclass(frozen=True)
class Published:
    """One row of the table of verl PR #5401; `images` and `experts`: extra columns."""

    run: str
    nodes: int
    gpus: int
    prompt: int
    response: int
    rows: int
    gain: float
    sessions: int = SESSIONS
    images: bool = False
    experts: bool = False
    gpu: Gpu = H100

    @property
    def family(self) -> Family:
        """Its token columns."""
        return Family(name=self.run, about="", prompt=self.prompt, response=self.response)

    @property
    def extra_bytes(self) -> float:
        """Bytes of a step's images or routed experts; pickling stores a prompt's images once."""
        tokens = self.rows * ASSUMED["fill"] * self.prompt
        images = tokens / self.sessions * ASSUMED["image_token_bytes"] if self.images else 0
        return images + (
            self.rows * (self.prompt + self.response) * ASSUMED["expert_token_bytes"] if self.experts else 0
        )


A3 = Gpu(flops=0.6e14, decode_tokens_s=800.0, sequence_tokens_s=30.0)
"""Assumed: a Huawei A3 die reaches some 0.4 of an H100."""
PUBLISHED = (
    Published("2x8 H100, Qwen3-30B-A3B with R3, DAPO-Math, 2K/8K", 2, 16, 2048, 8192, 1024, 14.1, experts=True),
    Published("4x8 H100, Qwen3-VL-30B-A3B, Geo3K, 1K/2K", 4, 32, 1024, 2048, 1024, 12.5, images=True),
    Published("2x8 H100, Qwen3-VL-30B-A3B, OneThinker, 16K/2K", 2, 16, 16384, 2048, 1024, 22.4, images=True),
    Published("16x8 H100, Qwen3-VL-30B-A3B, OneThinker, 16K/2K", 16, 128, 16384, 2048, 1024, 49.2, images=True),
    Published("2x16 A3, Qwen3-VL-30B-A3B, Geo3K, 1K/1K", 2, 32, 1024, 1024, 512, 7.0, sessions=4, images=True, gpu=A3),
    Published("2x16 A3, Qwen3-VL-30B-A3B, OneThinker, 16K/1K", 2, 32, 16384, 1024, 512, 20.0, sessions=4, images=True, gpu=A3),
)  # fmt: skip


def volume(family: Family, rows: int, extra_bytes: float = 0.0) -> int:
    """Bytes V that workers write, and that model stages read, in a step."""
    graph = step_graph(family)
    written = [name for stage in graph.stages if stage.name not in SCORING_STAGES for name in stage.writes]
    read = [name for stage in graph.stages if stage.name in MODEL_STAGES for name in stage.reads]
    return int(rows * family.row_bytes((*written, *read)) + extra_bytes * (1 + len(MODEL_STAGES)))


def calls(workers: int) -> int:
    """Calls to workers in a step: rollout and model stages on each, the rest on one."""
    return workers * (1 + len(MODEL_STAGES)) + len(SCORING_STAGES) + 1


def sample(row: dict[str, Any], cores: int) -> Sample:
    """A measured row as the model sees it."""
    nbytes = volume(FAMILIES[row["family"]], row["rows_per_step"])
    lanes = min(row["workers"], cores)
    return Sample(row["step_s"], row["driver_cpu_s"], nbytes, calls(row["workers"]), lanes)


def validated(rows: list[dict[str, Any]], cores: int) -> tuple[dict[str, Costs], list[dict[str, Any]]]:
    """Costs of each plane from all sizes of 4 workers, and the held-out error of every point.

    Raises:
        ValueError: too few points.
    """
    costs: dict[str, Costs] = {}
    out: list[dict[str, Any]] = []
    for plane in PLANES:
        points = [
            row for row in rows if row["plane"] == plane and row["compute"] == "none" and row["layout"] == "padded"
        ]
        of_four = [row for row in points if row["workers"] == 4]
        if len({row["mib"] for row in of_four}) < 3:
            raise ValueError(f"The model needs three sizes of plane {plane} with 4 workers; got {len(of_four)}.")
        costs[plane] = fit([sample(row, cores) for row in of_four])
        for row in points:
            one = sample(row, cores)
            without = fit([sample(other, cores) for other in of_four if other["mib"] != row["mib"]])
            seconds = without.seconds(one.nbytes, one.ops, one.lanes)
            error = 100 * (seconds / row["step_s"] - 1)
            name = f"{row['family']}, {row['mib']:g} MiB, {row['workers']} workers"
            measured = {"measured": name, "plane": plane, "measured_s": row["step_s"]}
            out.append({**measured, "predicted_s": short(seconds), "error_percent": short(error)})
    return costs, out


def spreads(checked: list[dict[str, Any]]) -> dict[str, Spread]:
    """The error bars of both planes, from `validated`."""
    return {plane: spread([row["error_percent"] for row in checked if row["plane"] == plane]) for plane in PLANES}


def predicted(costs: dict[str, Costs], errors: dict[str, Spread], run: Published, nic_gib_s: float) -> dict[str, Any]:
    """One published run: gain and transfer seconds of both planes, if the error bar allows."""
    nbytes = volume(run.family, run.rows, run.extra_bytes)
    lanes = run.nodes * ASSUMED["ranks_per_node"]
    seconds = {
        plane: costs[plane].seconds(nbytes, calls(int(lanes)), int(lanes))
        + network_s(nbytes, run.nodes, nic_gib_s, through_one=through_one)
        for plane, through_one in PLANES.items()
    }
    fill = ASSUMED["fill"]
    compute = compute_s(run.gpu, run.gpus, run.rows, fill * run.prompt, fill * run.response, run.response)
    gain = gain_percent(compute, seconds["driver"], seconds["simple"])
    bar = gain_bar_percent(compute, seconds["driver"], seconds["simple"], errors["driver"], errors["simple"])
    row = {
        "published": run.run,
        "nodes": run.nodes,
        "gib_per_step": short(nbytes / GIB),
        "published_gain_percent": run.gain,
        "error_bar_percent": short(bar),
    }
    if bar > MOST_BAR_PERCENT:
        return {**row, "prediction": f"not predicted: error bar {bar:.0f} %"}
    return {
        **row,
        "prediction": f"{gain:.3g} (error bar {bar:.0f} %)",
        "gain_percent": short(gain),
        "driver_transfer_s": short(seconds["driver"]),
        "ours_transfer_s": short(seconds["simple"]),
        "step_s": short(compute + seconds["driver"]),
    }


def short(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")


def main() -> int:
    """Fit, validate, predict, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--nic", type=float, default=10.0, help="GiB/s of a node's network interface")
    parser.add_argument("--smoke", action="store_true", help="nothing written")
    arguments = parser.parse_args()
    try:
        documents = [load(path) for path in arguments.results]
        cores = int(documents[0].hardware["cores"] or 1)
        measured = [row for document in documents for row in document.rows if "plane" in row]
        costs, checked = validated(measured, cores)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [*checked, *(predicted(costs, spreads(checked), run, arguments.nic) for run in PUBLISHED)]
    print("A prediction from the costs of this machine; assumptions: see --help.\n")
    for plane, cost in costs.items():
        print(
            f"{plane}: {cost.op_s * 1e3:.3g} ms per call, {cost.serial_s * GIB:.3g} + {cost.parallel_s * GIB:.3g} s/GiB"
        )
    for row in rows:
        print(row)
    if not arguments.smoke:
        publish("scale_model", rows, [*COMMAND, *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
