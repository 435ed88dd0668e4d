"""In-memory implementations of the ports and the conformance suites that every implementation must pass (extra `[testing]`)."""
