"""`rl watch`: what a run does now, on the terminal or in a browser."""
