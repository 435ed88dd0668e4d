"""The step as a graph of stages: their columns, and the settings that fit together."""
