"""``fit`` and ``partial_fit`` of all estimators: on a table, or on a stream of chunks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin

from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.repeats import uncounted
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.estimators.table import table


@dataclass(frozen=True, eq=False)
class Given:
    """Arguments of a fit.

    Attributes:
        X: shape (n, features). y: shape (n,).
        persons: owners of the rows, shape (n,); None: each row is a record.
        weights: of the rows' losses, shape (n,); None: all are 1.
        chunk: whether this is one chunk of a stream.
        classes: those that ``partial_fit`` goes by.
    """

    X: Any
    y: Any
    persons: Any
    weights: Any
    chunk: bool = False
    classes: Sequence[Any] | None = None


class Fits(ABC):
    """Base of the estimators, whose `_learn` trains."""

    @whole_fit
    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, persons: Any = None) -> Self:
        """Train on X of shape (n, features) and y of shape (n,).

        Args:
            X: an array, a data frame, or a sparse table of SciPy, which is never made dense as a
                whole; for linear models also a memory map or `data.ParquetRows`, which are read in
                blocks.
            sample_weight: factors of the rows' losses, >= 0, shape (n,); each as private as its
                row, and no function of other rows. Gradients are clipped after weighting, so the
                guarantee does not depend on them. A row of weight 0 adds nothing, and counts in n.
            persons: the owner of each row (numbers or strings), where the guarantee shall protect
                persons who have several.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
            RankError: another process has failed, or does not agree.
        """
        return self._fitted(Given(X, y, persons, sample_weight))

    @abstractmethod
    def _learn(self, given: Given) -> None:
        """Train; see ``fit``."""

    def _fitted(self, given: Given) -> Self:
        refuse_other_types(self)
        if given.chunk and hasattr(self, "_chunks"):
            with uncounted():  # a record is in one chunk alone; the first one counts for all
                self._learn(given)
        else:
            self._learn(given)
        return self

    def _rows(self, given: Given) -> Any:
        """X, its columns checked: against those of the chunks before, if there are any."""
        return table(given.X, reset=not (given.chunk and hasattr(self, "_chunks")), estimator=self)


class FitsNumbers(Fits, RegressorMixin):
    """Base of the regressors."""

    @whole_fit
    def partial_fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, persons: Any = None
    ) -> Self:
        """Train on one more chunk of a stream; what ``fit`` was given is the first.

        A network goes on from where the chunks before led; ``coef_`` is the mean over all rows.
        Every chunk may spend the whole budget, since every record, or with ``persons`` every
        person with all their rows, is in one chunk alone; that is taken on trust, and said in
        ``privacy_``. A ledger does not know it, and is charged for each chunk.

        Args:
            sample_weight: see ``fit``.
            persons: see ``fit``; in every call or in none.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        return self._fitted(Given(X, y, persons, sample_weight, chunk=True))


class FitsClasses(Fits, ClassifierMixin):
    """Base of the classifiers; the first chunk of a stream fixes the classes."""

    classes: Sequence[Any] | None
    classes_: NDArray[Any]

    @abstractmethod
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of shape (n, classes)."""

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of `predict_proba`, of shape (n, classes)."""
        with np.errstate(divide="ignore"):  # -inf where a probability rounds to 0
            return np.log(self.predict_proba(X))

    def _stated(self, given: Given) -> Sequence[Any] | None:
        """All classes, as public knowledge; None: they are to be read off y."""
        return given.classes if given.chunk else self.classes

    @whole_fit
    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Sequence[Any] | None = None,
        sample_weight: Any = None,
        *,
        persons: Any = None,
    ) -> Self:
        """Train on one more chunk of a stream; see `DPLinearRegression.partial_fit`.

        Args:
            classes: all classes, public; needed in the first call unless the estimator has its
                own.
            sample_weight: see ``fit``.
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
        return self._fitted(Given(X, y, persons, sample_weight, chunk=True, classes=stated))


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of each row, shape (n, classes)."""
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)
