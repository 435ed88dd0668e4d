"""The built-in checkpoint engines; the registry maps names to them."""
