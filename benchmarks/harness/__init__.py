"""Paired timing, verdicts, result files and their schema."""
