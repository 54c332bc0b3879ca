"""A filter for what `dp_accounting` logs though another bound takes its place."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_series_unlogged() -> Iterator[None]:
    """Leave out that a series of a Renyi divergence fails to converge, where another bounds it."""

    def others(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("_compute_log_a_frac failed to converge")

    log = logging.getLogger("absl")
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)
