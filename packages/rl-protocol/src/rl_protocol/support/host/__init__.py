"""What the system offers: Linux's own way, and a portable one behind the same functions."""
