"""Defaults that work, found on public data; functions of public numbers only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How to train a model well under a budget.

    Attributes:
        batch_size: expected batch; large batches make the noise small relative to the sum.
        epochs: passes over the data.
        clip_norm: bound on each record's gradient.
        learning_rate, momentum: of SGD.
        averaged: share of the last steps whose iterates are averaged into the result
            (post-processing, free).
        physical_batch_size: rows at a time; None: the whole batch.
    """

    batch_size: int
    epochs: float
    clip_norm: float
    learning_rate: float
    momentum: float
    averaged: float
    physical_batch_size: int | None


def recipe(model: str, n: int, features: str | None = None) -> Recipe:
    """The defaults for a softmax, mlp or cnn model on ``n`` records (n is public).

    Tuned on Fashion-MNIST (public). The batch is n / 15, and larger on small data.

    Args:
        features: ``"scattering"``: of images, large and alike in norm, so that nearly every
            gradient is clipped.
    """
    batch_size = min(n, max(512, n // 15))
    if model == "softmax" and features == "scattering":
        return Recipe(
            min(n, max(512, n // 7)), 40, 1.0, 1.0, 0.9, averaged=0.2, physical_batch_size=None
        )
    if model == "softmax":
        return Recipe(batch_size, 40, 1.0, 2.0, 0.9, averaged=0.5, physical_batch_size=None)
    if model == "mlp":
        return Recipe(batch_size, 40, 1.0, 1.0, 0.9, averaged=0.5, physical_batch_size=None)
    return Recipe(batch_size, 30, 1.0, 1.0, 0.9, averaged=0.3, physical_batch_size=512)
