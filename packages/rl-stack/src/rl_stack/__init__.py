"""All packages of the stack in one install; this one has no code."""

__version__ = "0.1.0"
