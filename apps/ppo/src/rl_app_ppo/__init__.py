"""The PPO application: `uv run apps/ppo` on the command line, `train()` from Python.

Importing the package alone takes milliseconds; its names are imported on first use, so that the
command `rl` can handle Ctrl-C from its first moment.
"""

TYPE_CHECKING = False  # importing typing, as importlib, takes longer than all else before Ctrl-C is handled
if TYPE_CHECKING:
    from rl_app_ppo.api.result import TrainResult
    from rl_app_ppo.api.train import train
    from rl_protocol import ConfigError, RLError
del TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["ConfigError", "RLError", "TrainResult", "__version__", "train"]

_HOMES = {
    "ConfigError": "rl_protocol",
    "RLError": "rl_protocol",
    "TrainResult": "rl_app_ppo.api.result",
    "train": "rl_app_ppo.api.train",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
