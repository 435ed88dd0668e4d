"""Code that runs inside a worker process, and the messages that it gets."""
