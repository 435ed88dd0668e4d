"""Starts and finds planes; entry points of the server processes and threads."""
