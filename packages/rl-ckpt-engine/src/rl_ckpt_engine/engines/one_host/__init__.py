"""Engines within one host: references within a process, shared memory, GPU memory."""
