"""The client side: calls, connections, and access to the memory of a plane."""
