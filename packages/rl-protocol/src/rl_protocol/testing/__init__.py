"""In-memory implementations of the ports, and conformance suites (extra `[testing]`)."""
