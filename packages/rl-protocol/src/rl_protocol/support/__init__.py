"""Utilities shared by several packages: plug-ins, secrets, files, host identity."""
