"""`rl new`: a plug-in package with a passing test, from the templates beside this module."""
