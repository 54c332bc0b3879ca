"""How each kind of layer has its per-sample gradients taken."""
