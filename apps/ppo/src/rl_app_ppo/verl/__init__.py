"""Configurations of verl: one table of its keys (`table`), and the conversion of whole files (`convert`, `reading`)."""
