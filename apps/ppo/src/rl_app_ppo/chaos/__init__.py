"""`rl chaos`: runs whose processes are killed at moments that a seed decides, and their count."""
