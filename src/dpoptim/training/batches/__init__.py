"""From a sampler's indices to the batches that a loop is given."""
