"""Sizes, names, fingerprint and layout over ranks of the base model. Needs no torch."""
