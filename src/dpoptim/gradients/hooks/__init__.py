"""Hooks on a model's layers, and models that cannot be put under them."""
