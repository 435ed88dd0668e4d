"""The storage unit processes, which hold the bytes."""
