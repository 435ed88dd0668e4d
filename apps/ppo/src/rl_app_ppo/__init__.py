"""The PPO application: `uv run apps/ppo` on the command line, `train()` from Python."""

from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.api.train import train

__version__ = "0.1.0"
__all__ = ["TrainResult", "__version__", "train"]
