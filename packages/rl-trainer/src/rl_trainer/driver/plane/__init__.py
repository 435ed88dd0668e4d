"""What the driver asks the data plane: where rows are, and what has moved."""
