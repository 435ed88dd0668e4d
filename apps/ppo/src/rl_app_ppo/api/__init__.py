"""Training from Python: `rl_app_ppo.train`, and what it shares with the command line."""
