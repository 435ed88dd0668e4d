"""Base classes of engines: published versions, receive buffer, shared memory."""
