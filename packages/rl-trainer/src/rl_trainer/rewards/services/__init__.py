"""Scorers that ask a service over HTTP (extra `http`)."""
