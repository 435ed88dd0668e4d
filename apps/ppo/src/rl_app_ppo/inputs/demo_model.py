"""The demo's base model: the settings that make it, and its cache entry. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.cache import entry_path, is_whole
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.settings import WarmUpSettings


def warm_up_settings(config: AppConfig) -> WarmUpSettings:
    """The warm-up that makes the base model of a run of the demo."""
    demo = DEMOS[config.data.demo]
    return WarmUpSettings(
        demo=config.data.demo,
        careless_share=demo.careless_share,
        target_probability=demo.target_probability,
        seed=config.data.seed,
        data_seed=config.data.seed,
        train_size=config.data.train_size,
        validation_size=config.data.val_size,
    )


def cached_demo_model(config: AppConfig) -> Path | None:
    """Folder of the demo's base model in the cache; None: it must be made."""
    entry = entry_path(Path(config.model.cache_dir).expanduser(), warm_up_settings(config))
    return entry if is_whole(entry) else None
