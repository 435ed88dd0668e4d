"""Rows and blocks of a plane: pure bookkeeping without sockets or clocks."""
