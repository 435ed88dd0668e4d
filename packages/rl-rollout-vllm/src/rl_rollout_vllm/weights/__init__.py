"""Checkpoints, adapters, and the shared memory that carries weights to vLLM's workers."""
