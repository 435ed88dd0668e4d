"""What the processes of a plane exchange: messages, descriptors, spans and tags."""
