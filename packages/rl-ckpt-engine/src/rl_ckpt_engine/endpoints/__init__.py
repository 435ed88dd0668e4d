"""Trainer and replica side: endpoints that connect an engine to a source or sink of weights."""
