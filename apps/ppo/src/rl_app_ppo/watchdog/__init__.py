"""A thread that ends a run in which nothing moves, with a report of who waits for what."""
