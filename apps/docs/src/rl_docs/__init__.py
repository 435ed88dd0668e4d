"""The documentation site: its pages are the Markdown files of the repository."""

__version__ = "0.1.0"
