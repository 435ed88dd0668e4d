"""The counterpart of each key of verl's configuration; table.py finds it."""
