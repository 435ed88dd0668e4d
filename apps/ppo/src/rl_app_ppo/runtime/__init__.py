"""Processes: the only modules that import Ray."""
