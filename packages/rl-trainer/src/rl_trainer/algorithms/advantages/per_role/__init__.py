"""Estimators that tell roles apart."""
