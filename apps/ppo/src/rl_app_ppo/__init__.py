"""The PPO application."""
