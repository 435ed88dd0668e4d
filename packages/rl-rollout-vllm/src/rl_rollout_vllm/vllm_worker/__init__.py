"""Code that runs inside vLLM's processes."""
