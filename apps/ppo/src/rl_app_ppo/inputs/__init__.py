"""The inputs of a run: the model folder, its tokenizer, and the data."""
