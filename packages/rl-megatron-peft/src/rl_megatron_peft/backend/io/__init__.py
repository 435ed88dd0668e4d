"""File formats: snapshots, Hugging Face models, and verl's old adapter checkpoints."""
