"""Estimators that compare turns of agents."""
