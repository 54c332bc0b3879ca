"""Noisy counts of records in public classes, and class weights from them."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from dpoptim.arguments import positive_number
from dpoptim.data.input_arrays import one_axis
from dpoptim.data.numbers import classes_of
from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.preprocessing.private_step import ChargedFit
from dpoptim.statistics import Floats, histogram_bound, warn_of_other_labels


@dataclass(eq=False, repr=False)
class DPClassCounts(ChargedFit):
    """Counts of labels with noise, such as for ``class_weight``.

    Args:
        classes: all classes, public.
        epsilon: the budget, > 0.
        delta: in (1e-14, 1), or ``"auto"``: at most 1e-5 and 1/(10 n).
        neighboring, n, ledger, noise_seed: as for `DPStandardScaler`.

    Attributes:
        counts_: float64, shape (classes,), at least 1 each.
        privacy_: `Guarantee` of the fit.

    **Guarantee.** ``privacy_``, for every list of labels: a record adds 1 to one count at most (a
    label that is no class adds nothing), so the vector of counts has one Gaussian.

    Examples:
        >>> from dpoptim.preprocessing import DPClassCounts
        >>> y = ["ill"] * 50 + ["healthy"] * 450
        >>> counts = DPClassCounts(["healthy", "ill"], epsilon=0.5).fit(y)
        >>> weight = counts.class_weight()
        >>> weight["ill"] > weight["healthy"]
        True
    """

    classes: Sequence[Any] | None = None
    _: KW_ONLY
    epsilon: float = 0.1

    @whole_fit
    def fit(self, y: Any) -> Self:
        """Count. Args: y of shape (n,).

        Raises:
            ValueError: no public classes, or a setting out of range.
        """
        refuse_other_types(self)
        if self.classes is None or len(self.classes) < 2:
            raise ValueError(
                "classes must be all classes, at least two, as public knowledge; y itself is "
                "private."
            )
        labels = one_axis("y", y)
        self.classes_: NDArray[Any] = np.unique(np.asarray(self.classes))
        places = classes_of(self.classes_.tolist(), labels)
        counts = np.bincount(places + 1, minlength=len(self.classes_) + 1)[1:].astype(np.float64)
        price = self._price(len(labels))
        released = self._released(counts, histogram_bound(self.relation), price)
        known = float(released.values.sum())
        warn_of_other_labels(known, released.deviation * math.sqrt(len(counts)), price.n)
        self.counts_: Floats = np.maximum(released.values, 1.0)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.target_tags.one_d_labels = False, True
        return tags

    def class_weight(self, *, most: float = 10.0) -> dict[Any, float]:
        """Weights that balance the classes: n / (classes * count), at most ``most``."""
        check_is_fitted(self)
        balanced = self.counts_.sum() / (len(self.counts_) * self.counts_)
        weights = np.minimum(balanced, positive_number("most", most))
        return dict(zip(self.classes_.tolist(), weights.tolist(), strict=True))
