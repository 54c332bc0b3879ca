"""Optimizers that know of the noise in their gradients."""

from dpoptim.optim.adam_bc import AdamBC

__all__ = ["AdamBC"]
