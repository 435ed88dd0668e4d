"""Rollout engines behind the RolloutEngine port."""
