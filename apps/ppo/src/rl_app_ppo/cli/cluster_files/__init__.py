"""Files that start a run on a cluster (`rl launch`)."""
