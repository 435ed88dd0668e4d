"""What a run shows and writes: terminal, run folder, metrics."""
