"""The record of a run: what workers and driver append beside it, and how it is read."""
