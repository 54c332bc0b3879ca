"""Per-sample gradients by kind: how each is measured and added up."""
