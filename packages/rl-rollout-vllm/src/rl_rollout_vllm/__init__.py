"""vLLM as a rollout engine of the RL stack."""
