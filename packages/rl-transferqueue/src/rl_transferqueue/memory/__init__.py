"""Shared memory, and reading rows out of it; used by clients, controller and storage units."""
