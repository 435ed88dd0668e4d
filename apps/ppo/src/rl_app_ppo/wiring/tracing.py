"""Inside a worker process: what torch does, as a trace."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """Records from when it is made until `write`: operations of the thread that made it, and kernels where there is a GPU."""

    def __init__(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write a Chrome trace.

        Raises:
            OSError: it can't be written.
        """
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
