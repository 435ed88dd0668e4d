"""The demo: a verifiable task, a tokenizer, a small model, and the warm-up that makes the base model of a run.

Import from the modules: `arithmetic`, `settings` and `store` need no torch, the others do.
"""
