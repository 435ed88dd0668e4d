"""Train a tiny policy through each plane; all parameters must be equal, bit by bit.

Two workers sum their gradients (gloo); the objective and the estimator are those of rl_trainer.
Every column of a step, routed experts and pixel values included, affects the parameters.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_step.cluster import cluster
from ppo_step.compute import Workload
from ppo_step.steps import train

WORKERS = 2


def same_training(planes: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train through each plane, and print the digest of its parameters; one row per plane.

    Raises:
        SystemExit: code 1, if a plane's parameters differ from those of the first plane.
    """
    workload = Workload(family="tiny", layout="ragged", rows=16, workers=WORKERS, real=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, cluster(planes, WORKERS, 16 << 20) as everything:
        everything.join(Path(folder) / "meeting")
        for name in everything.planes:
            digests = train(everything, name, workload, steps)
            if len(set(digests)) > 1:
                sys.exit(f"{name}: the workers' parameters differ, although they sum their gradients: {digests}")
            rows.append({"plane": name, "steps": steps, "workers": WORKERS, "parameters_sha256": digests[0]})
            print(rows[-1], flush=True)
    different = [row["plane"] for row in rows if row["parameters_sha256"] != rows[0]["parameters_sha256"]]
    if different:
        sys.exit(f"The parameters differ from those of {rows[0]['plane']}: {', '.join(different)}")
    return rows
