"""The command line of `uv run apps/ppo`: main.py is its entry."""
