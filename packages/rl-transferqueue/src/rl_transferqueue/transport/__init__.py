"""How messages and bytes travel: unix sockets, ZeroMQ, bulk TCP, event loop, keys and limits."""
