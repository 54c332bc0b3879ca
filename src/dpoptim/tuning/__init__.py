"""Settings chosen privately: a random number of trials, of which only the best leaves."""

from dpoptim.tuning.search import DPSearchCV

__all__ = ["DPSearchCV"]
