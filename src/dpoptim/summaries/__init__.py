"""Single statistics of a private column: a mean, a sum, a count, a histogram, a quantile."""

from dpoptim.summaries.summary import Summary

__all__ = ["Summary"]
