"""Calls that are repeated: puts without an answer, and calls to a controller that was replaced."""
