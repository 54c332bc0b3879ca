"""Categories as columns of 0 and 1, for categories that are public."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from dpoptim.statistics import Floats


class DPOneHot(TransformerMixin, BaseEstimator):
    """One column for each public category, and none for anything else.

    Fitting reads no record, so it is free: the list of categories that *occur* in private data is
    private itself, and publishing those that occur often enough would need a delta that the
    ledger's events cannot express. So the categories are what can be known without the data.

    Args:
        categories: for each column of X the list of its public categories.
        scale: of the ones; 1 / sqrt(columns of X) makes every encoded row at most 1 long.

    Attributes:
        privacy_: None; nothing is released.

    **Guarantee.** What it does to a record depends on that record alone.

    Examples:
        >>> from dpoptim.preprocessing import DPOneHot
        >>> DPOneHot([["no", "yes"]]).fit_transform([["yes"], ["perhaps"]])
        array([[0., 1.],
               [0., 0.]])
    """

    privacy_: None = None

    def __init__(
        self, categories: Sequence[Sequence[Any]] | None = None, *, scale: float = 1.0
    ) -> None:
        self.categories = categories
        self.scale = scale

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the settings. Args: X of shape (n, columns), of which only the number of columns
        is read.

        Raises:
            ValueError: no list of categories for each column, or one that names a category twice.
        """
        columns = _columns(X)
        if self.categories is None or len(self.categories) != columns.shape[1]:
            raise ValueError(
                "categories must be one list of public categories for each column of X; which ones "
                "occur in the data is private. Fix: categories=[[...], ...]."
            )
        for column, names in enumerate(self.categories):
            if len({str(name) for name in names}) != len(names) or not len(names):
                raise ValueError(
                    f"categories[{column}] must name each category once, and at least one."
                )
        self.categories_ = [[str(name) for name in names] for names in self.categories]
        self.n_features_in_ = columns.shape[1]
        return self

    def transform(self, X: Any) -> Floats:
        """Shape (n, categories of all columns); a value that is no category gives zeros."""
        check_is_fitted(self)
        columns = _columns(X)
        if columns.shape[1] != self.n_features_in_:
            raise ValueError(f"X must have {self.n_features_in_} columns, as in fit.")
        parts = [
            columns[:, [i]] == np.array(names)[None, :] for i, names in enumerate(self.categories_)
        ]
        encoded: Floats = np.hstack(parts).astype(np.float64) * self.scale
        return encoded

    def get_feature_names_out(
        self, input_features: Sequence[str] | None = None
    ) -> NDArray[np.object_]:
        """``column_category`` for every column of the result."""
        check_is_fitted(self)
        names = (
            [f"x{i}" for i in range(self.n_features_in_)]
            if input_features is None
            else list(input_features)
        )
        found = [
            f"{name}_{category}"
            for name, known in zip(names, self.categories_, strict=True)
            for category in known
        ]
        return np.array(found, dtype=object)


def _columns(x: Any) -> NDArray[np.str_]:
    """X as text, shape (n, columns)."""
    array = np.asarray(x, dtype=object)
    if array.ndim != 2:
        raise ValueError("X must have two axes: records and columns.")
    return array.astype(str)
