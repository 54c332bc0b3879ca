"""The training algorithms, each a frozen set of public settings with a ``plan``."""

from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.plan import METHODS

METHODS.update({"DPSGD": DPSGD})

__all__ = ["DPSGD"]
