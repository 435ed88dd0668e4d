"""Checkpoints of whole runs: the folder format, and what a model offers to be saved and resumed."""
