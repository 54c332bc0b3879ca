"""Products, sums and norms whose rounding is known."""
