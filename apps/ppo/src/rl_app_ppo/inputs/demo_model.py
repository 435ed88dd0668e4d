"""The demo's base model: the settings that make it, and its cache entry. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.cache import entry_path, is_whole
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.settings import WarmUpSettings
from rl_protocol.support.disk_writes import write_errors


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


def check_demo_model(config: AppConfig) -> str:
    """Check that the demo's base model is in the cache, or can be written there; says which.

    Raises:
        OutputError: it is not, and the cache can't be written.
    """
    if config.model.path:
        return "not used"
    if cached_demo_model(config):
        return "it is in the cache"
    cache = Path(config.model.cache_dir).expanduser()
    remedy = "Make the folder writable, free some space, or set model.cache_dir to another place."
    with write_errors(cache, "The demo's model", remedy):
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache) as probe:
            probe.write(b"\0" * 4096)
    return f"the run makes it in {cache}"
