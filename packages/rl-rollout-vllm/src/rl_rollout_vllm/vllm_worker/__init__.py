"""Code that runs inside vLLM's worker processes."""
