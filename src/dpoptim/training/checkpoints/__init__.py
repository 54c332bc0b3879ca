"""Checkpoints of runs, in one process and in several."""
