"""The driver process: run.py starts the workers, connects them, and trains."""
