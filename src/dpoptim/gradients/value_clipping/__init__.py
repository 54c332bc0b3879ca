"""Value clipping: bounds from the forward pass alone."""
