"""How each kind of layer takes part in book-keeping."""
