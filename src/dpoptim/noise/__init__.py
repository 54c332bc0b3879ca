"""Streams of randomness for privacy. Only the gate draws noise from them (a test greps for it)."""

from dpoptim.noise.gaussian import add_normal, fill_standard_normal
from dpoptim.noise.stream import KeyStream

__all__ = ["KeyStream", "add_normal", "fill_standard_normal"]
