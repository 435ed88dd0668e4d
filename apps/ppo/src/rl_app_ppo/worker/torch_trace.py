"""A torch profiler trace of a worker process. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """A trace from its creation to `write`: operations of the creating thread, and GPU kernels."""

    def __init__(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write a Chrome trace.

        Raises:
            OSError: the file can't be written.
        """
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
