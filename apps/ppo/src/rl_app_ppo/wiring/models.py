"""Inside a worker process: torch settings and the demo model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from rl_app_ppo.config import from_yaml
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.settings import WarmUpSettings
from rl_app_ppo.demo.warmup import cached_base_model


def configure(threads: int) -> None:
    """Compute threads of this process; transformers' bars and notes go nowhere."""
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def demo_model(config: str, report: Callable[[int, int, float], None]) -> Path:
    """The warmed-up demo model of this configuration, from the cache or made now."""
    app = from_yaml(config)
    demo = DEMOS[app.data.demo]
    settings = WarmUpSettings(
        demo=app.data.demo,
        careless_share=demo.careless_share,
        target_probability=demo.target_probability,
        seed=app.data.seed,
        data_seed=app.data.seed,
        train_size=app.data.train_size,
        validation_size=app.data.val_size,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))  # the other processes are waiting for this one
    try:
        return cached_base_model(
            Path(app.model.cache_dir).expanduser(), settings, lambda s, t, loss, _: report(s, t, loss)
        )
    finally:
        torch.set_num_threads(threads)
