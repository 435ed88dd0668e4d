"""`rl replay`: looks into the batch of a step, trains it again, and names what differs."""
