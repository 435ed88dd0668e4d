"""Train a tiny policy through each plane; all parameters must be equal, bit by bit.

    uv run --group bench benchmarks/bench_same_training.py [--steps 3] [--smoke]
        [--planes driver,driver-buffers,transferqueue,simple,ray]

Two workers sum their gradients (gloo); the objective and the estimator are those of rl_trainer.
Every column of a step, routed experts and pixel values included, affects the parameters. Exits with
code 1 if a plane's parameters differ from those of the first plane.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.pairs import publish
from ppo_step.cluster import PLANES, cluster
from ppo_step.compute import Workload
from ppo_step.steps import train

WORKERS = 2


def main() -> None:
    """Train, compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planes", default=",".join(PLANES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="nothing written")
    arguments = parser.parse_args()
    workload = Workload(family="tiny", layout="ragged", rows=16, workers=WORKERS, real=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, cluster(arguments.planes.split(","), WORKERS, 16 << 20) as everything:
        everything.join(Path(folder) / "meeting")
        for name in everything.planes:
            digests = train(everything, name, workload, arguments.steps)
            if len(set(digests)) > 1:
                sys.exit(f"{name}: the workers' parameters differ, although they sum their gradients: {digests}")
            rows.append({"plane": name, "steps": arguments.steps, "workers": WORKERS, "parameters_sha256": digests[0]})
            print(rows[-1], flush=True)
    different = [row["plane"] for row in rows if row["parameters_sha256"] != rows[0]["parameters_sha256"]]
    if different:
        sys.exit(f"The parameters differ from those of {rows[0]['plane']}: {', '.join(different)}")
    if not arguments.smoke:
        publish("same_training", rows)


if __name__ == "__main__":
    main()
