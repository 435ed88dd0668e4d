"""Batches of columns, row keys and metadata, and the schemas that check them."""
