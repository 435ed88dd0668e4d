"""One PPO step over several data planes; read payloads, graph, planes in this order."""

import os

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
    "0"  # under `uv run`, Ray would start every worker in a copy of the repository
)
