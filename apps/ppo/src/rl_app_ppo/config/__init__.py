"""The configuration: schema.py has its keys, loading.py resolves files and overrides."""
