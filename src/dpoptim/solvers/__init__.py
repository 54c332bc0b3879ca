"""Whole-run algorithms for empirical and population risk."""
