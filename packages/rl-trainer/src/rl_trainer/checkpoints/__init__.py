"""Checkpoints of whole runs: what a folder of one holds, how it is written so that it is whole or not there, and how a run goes on from it."""
