"""Engines over shared storage: Ray's object store, a directory."""
