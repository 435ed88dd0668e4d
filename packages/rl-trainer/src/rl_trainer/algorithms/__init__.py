"""Advantages, losses and other algorithms as pure functions, in numpy or torch."""
