"""Settings chosen on public proxies, free; or by private trials of which only the best leaves."""

from dpoptim.tuning.public import Tried, tune_on_public
from dpoptim.tuning.search import DPSearchCV

__all__ = ["DPSearchCV", "Tried", "tune_on_public"]
