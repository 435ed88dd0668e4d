"""Losses of the ratio of a whole response, by their published names."""
