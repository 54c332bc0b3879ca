"""Sums of clipped gradients, up to what a step releases."""
