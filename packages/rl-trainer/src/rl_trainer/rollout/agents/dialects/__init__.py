"""How models write tool calls and read answers: a module per family, and their names."""
