"""The updates of a step: their calls, what they train on, and how they are repeated."""
