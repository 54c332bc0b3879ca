"""Classifiers that learn from a stream of chunks, the first of which fixes the classes."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin


class ChunkedClassifier(ClassifierMixin):
    """Base of the classifiers, whose `_learn` trains on one chunk."""

    classes: Sequence[Any] | None
    classes_: NDArray[Any]

    def _learn(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        classes: Sequence[Any] | None,
        persons: Any,
        *,
        chunk: bool,
    ) -> Self:
        raise NotImplementedError

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Sequence[Any] | None = None,
        sample_weight: None = None,
        *,
        persons: Any = None,
    ) -> Self:
        """Train on one more chunk of a stream; what ``fit`` was given is the first.

        A network goes on from where the chunks before led; ``coef_`` is the mean over all rows.

        Every chunk may spend the whole budget, since every record is in one chunk alone; that is
        taken on trust, and said in ``privacy_``. A ledger does not know it, and is charged for
        each chunk.

        Args:
            classes: all classes, public; needed in the first call unless the estimator has its
                own.
            persons: see ``fit``; in every call or in none.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        stated: Any = self.classes if classes is None else classes
        if hasattr(self, "_chunks"):
            if classes is not None and not np.array_equal(
                np.unique(np.asarray(classes)), self.classes_
            ):
                raise ValueError(
                    "classes must be the same in every call of partial_fit; call fit to start anew."
                )
            stated = self.classes_
        elif stated is None:
            raise ValueError(
                "classes must be passed on the first call to partial_fit: later chunks may hold "
                "others."
            )
        return self._learn(X, y, sample_weight, stated, persons, chunk=True)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of each row, shape (n, classes)."""
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)
