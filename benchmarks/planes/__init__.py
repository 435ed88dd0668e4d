"""One PPO step over three data planes: what bench_controller_bottleneck.py measures. Read payloads, graph, planes, in this order."""

import os

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
    "0"  # under `uv run`, Ray would start every worker in a copy of the repository
)
