"""Exact audit of the steps that prepare images: a record's features are its own."""

from typing import Any

import numpy as np

from dpoptim.data.preparation import CHUNK, STEPS

SETTINGS: dict[str, dict[str, Any]] = {"divide": {"by": 255.0}}  # of steps that have no defaults


def image_features() -> str:
    """The detector: features of an image that depend on the others, to the last bit.

    Every listed step, on more colour images than are prepared at a time.
    """
    images = np.random.default_rng(0).uniform(0, 1, (CHUNK + 2, 3, 8, 8)).astype(np.float32)
    watched, found = (0, CHUNK + 1), []
    for name, kind in STEPS.items():
        step = kind(**SETTINGS.get(name, {}))
        together = step(images)
        for place in watched:
            others = np.sqrt(images)
            others[place] = images[place]
            alone = step(images[place : place + 1])[0]
            if not np.array_equal(alone, together[place]):
                found.append(f"refuted: {name} gives an image other features when it is alone")
            elif not np.array_equal(step(others)[place], alone):
                found.append(f"refuted: {name} gives an image other features beside other images")
    return "; ".join(dict.fromkeys(found))
