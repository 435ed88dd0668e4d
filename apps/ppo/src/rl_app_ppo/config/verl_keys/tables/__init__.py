"""The parts of the table, by groups of verl's configuration."""
