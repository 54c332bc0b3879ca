"""The papers' experiments, run again with this library."""
