"""Checks before a process starts: registry.py lists all of them."""
