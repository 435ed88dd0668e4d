"""PPO and GRPO trainer whose driver handles only metadata."""
