"""The layers that the ziggurat draws from: `dpoptim.noise.ziggurat` says how."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LAYERS = 1024
# The R at which 1,024 layers of equal area end at f = 1, solved in 50 digits.
TAIL_START = 4.0388498461095045227144234053359312
_AREA = 0.0012263246463530880728853709377271370619  # R f(R) + integral of f beyond R


def _edges() -> Floats:
    """x_0 > x_1 = R > ... > x_1024 = 0; x_0 = area / f(R): layer 0's width as a rectangle."""
    edges = [_AREA / np.exp(-0.5 * TAIL_START**2), TAIL_START]
    while len(edges) < LAYERS:
        x = edges[-1]
        edges.append(np.sqrt(-2.0 * np.log(np.exp(-0.5 * x * x) + _AREA / x)))
    return np.array([*edges, 0.0])


EDGES = _edges()
_HEIGHTS = np.exp(-0.5 * EDGES**2)
# a word read as a signed integer times this is a place in the layer
STEP = EDGES[:-1] * 2.0**-63
# nearer to 0 than this, the layer lies under the curve over its whole height
INNER = EDGES[1:].copy()
STEP_AND_INNER = np.stack([STEP, INNER], 1)
FLOOR = _HEIGHTS[:-1].copy()
RISE = np.diff(_HEIGHTS)
