"""Checks before a process starts: preflight.py runs all of them."""
