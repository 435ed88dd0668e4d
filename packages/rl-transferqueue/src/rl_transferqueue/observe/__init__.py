"""Status, metrics and the command `rl-tq`."""
