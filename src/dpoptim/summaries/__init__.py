"""Single statistics of a private column: a mean, a count, a histogram, a quantile."""
