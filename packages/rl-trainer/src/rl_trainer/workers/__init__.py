"""What runs in the worker processes: one class per role, and the messages they answer."""
