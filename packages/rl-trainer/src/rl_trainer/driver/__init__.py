"""What runs in the driver process: the training loop, and the calls it sends to workers."""
