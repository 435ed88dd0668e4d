"""The demo: tasks, tokenizer, a small model, and the warm-up that makes its base model."""
