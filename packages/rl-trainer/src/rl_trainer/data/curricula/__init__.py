"""Curricula that see scores: what is known of each prompt, and the order that follows from it."""
