"""The PPO application: configuration, wiring and the demo task. Run it with `uv run apps/ppo`."""

__version__ = "0.1.0"
