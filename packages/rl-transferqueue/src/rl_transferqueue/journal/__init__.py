"""The journal of a plane: rows that survive the death of its processes and a loss of power."""
