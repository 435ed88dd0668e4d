"""torch settings of a worker process, and the demo model. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from rl_app_ppo.config.loading import from_yaml
from rl_app_ppo.inputs.demo_model import warm_up_settings
from rl_app_ppo.worker.cores import cores_of_each


def configure(threads: int) -> None:
    """Set the compute threads, and silence the progress bars and logs of transformers.

    Args:
        threads: trainer.threads_per_worker; 0: one until `share_cores` is called.
    """
    torch.set_num_threads(threads or 1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def share_cores(processes: int) -> None:
    """Compute with this process's part of the cores, which `processes` of them share."""
    threads = cores_of_each(processes)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def release_cached_memory() -> None:
    """Give the memory that torch keeps for later tensors back to the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def demo_model(config: str, report: Callable[[int, int, float], None]) -> Path:
    """Make the demo model of this configuration, or find it in the cache; returns its folder."""
    app = from_yaml(config)
    from rl_app_ppo.demo.warmup import cached_base_model  # transformers' model classes

    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))  # the other processes wait for this one
    try:
        return cached_base_model(
            Path(app.model.cache_dir).expanduser(), warm_up_settings(app), lambda s, t, loss, _: report(s, t, loss)
        )
    finally:
        torch.set_num_threads(threads)
