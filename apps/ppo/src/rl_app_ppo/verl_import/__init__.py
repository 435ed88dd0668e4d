"""`--from-verl`: read a verl configuration and convert it."""
