"""Privacy bugs of features that images are given, put into this library for as long as a ``with``
lasts. For testing detectors only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from dpoptim.data.preparation import Floats, OpponentColours, Scatter, Whiten


@contextmanager
def colours_of_one_deviation() -> Iterator[None]:
    """Brightness and differences are each divided by their deviation in all images."""
    honest = OpponentColours.__call__

    def call(step: OpponentColours, x: Floats) -> Floats:
        mixed = honest(step, x)
        return mixed / mixed.std((0, 2, 3), keepdims=True)

    with patch.object(OpponentColours, "__call__", call):
        yield


@contextmanager
def planes_of_one_deviation() -> Iterator[None]:
    """Scattering planes have mean 0 and deviation 1 over all images, not in each."""
    honest = Scatter.fill

    def fill(step: Scatter, features: Floats, x: Floats) -> Floats:
        planes = honest(step, features, x)
        planes -= planes.mean((0, 2, 3), keepdims=True)
        planes /= planes.std((0, 2, 3), keepdims=True)
        return planes

    with patch.object(Scatter, "fill", fill):
        yield


@contextmanager
def mean_image_taken_off() -> Iterator[None]:
    """Whitening begins with taking the mean of all images off."""
    honest = Whiten.__call__

    def call(step: Whiten, x: Floats) -> Floats:
        return honest(step, x - np.mean(x, 0, dtype=np.float32))

    with patch.object(Whiten, "__call__", call):
        yield
