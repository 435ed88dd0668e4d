"""The rollout engine in the caller's process: requests, admission, updates, and vLLM's client."""
