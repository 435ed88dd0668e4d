"""The systems we compare with."""
