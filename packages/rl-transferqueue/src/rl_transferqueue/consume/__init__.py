"""Consumers of a plane: samplers, sampled batches, torch data sets, replay buffer."""
