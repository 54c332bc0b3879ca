"""Categories as columns of 0 and 1: public ones, or by noisy counts of buckets."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import ndtri
from sklearn.utils.validation import check_is_fitted

from dpoptim.arguments import whole_number
from dpoptim.data.input_arrays import checked_table
from dpoptim.data.numbers import text_of
from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.preprocessing.private_step import SummedStep
from dpoptim.statistics import histogram_bound

FALSE_FINDS = 0.05  # chance that any empty bucket of a fit is kept


@dataclass(eq=False, repr=False)
class DPOneHot(SummedStep):
    """One column for each category, and none for anything else.

    The list of categories that *occur* in private data is private itself. So a column's categories
    are public, and then nothing is released; or they are found by noisy counts: every value falls
    into one of ``buckets`` by a public hash, all buckets are counted with noise, empty ones
    included, and those that hold clearly more than noise become columns. Names never leave: a
    column is a bucket, and rare categories that share one are told apart no more. (Publishing the
    names of frequent categories would need a delta of its own, which a budget's filter has no
    place for; counting every bucket needs none.)

    Args:
        categories: for each column of X the list of its public categories, or None where they are
            not public. None altogether: no column has public ones.
        scale: of the ones; 1 / sqrt(columns of X) makes every encoded row at most 1 long.
        buckets: for each column without public categories, from 2 to 65536; public.
        sparse_output: give a CSR table, which holds one entry for each value that is a category.
        least_share: of the records that a bucket must hold to become a column, in [0, 1).
        epsilon: the budget, > 0; needed for columns without public categories only.
        delta, neighboring, n, ledger, noise_seed: as for `DPStandardScaler`.

    Attributes:
        categories_: for each column of X its categories, or the numbers of its buckets, as text.
        privacy_: `Guarantee` of the fit; None where nothing is released.

    **Guarantee.** ``privacy_``, for every table: a record adds 1 to one bucket of each column that
    is counted, so the vector of all counts, whose length public numbers decide, has one Gaussian.
    Which buckets become columns is read off the noisy counts alone. What transforming does to a
    record depends on that record and on these.

    Examples:
        >>> from dpoptim.preprocessing import DPOneHot
        >>> DPOneHot([["no", "yes"]]).fit_transform([["yes"], ["perhaps"]])
        array([[0., 1.],
               [0., 0.]])
        >>> towns = [["jena"]] * 400 + [["kiel"]] * 300 + [["nowhere"]]
        >>> DPOneHot(epsilon=1.0).fit_transform(towns).shape[0]
        701
    """

    categories: Sequence[Sequence[Any] | None] | None = None
    _: KW_ONLY
    scale: float = 1.0
    buckets: int = 1024
    least_share: float = 0.0
    sparse_output: bool = False
    reads_sparse: ClassVar[bool] = False  # a number that is not stored is no category

    @property
    def charged(self) -> bool:
        """Whether a column has no public categories."""
        return self.categories is None or any(names is None for names in self.categories)

    def norm_bound(self, columns: int) -> float:
        """How long the counts are that one record adds, at most."""
        counted = columns
        if self.categories is not None:
            counted = sum(names is None for names in self.categories)
        return math.sqrt(counted) * histogram_bound(self.relation)

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the categories. Args: X of shape (n, columns), of any values that have a text.

        Raises:
            ValueError: not as many lists of categories as columns, one that names a category twice,
                no epsilon where one is needed, or a setting out of range; before anything is spent.
        """
        refuse_other_types(self)
        columns = self._columns(X, reset=True)
        given = self._given(columns.shape[1])
        counted = [column for column, names in enumerate(given) if names is None]
        self.privacy_ = None
        found = self._frequent(columns, counted) if counted else {}
        self.counted_ = tuple(counted)
        self.categories_ = [
            found[column] if names is None else [category_name(name) for name in names]
            for column, names in enumerate(given)
        ]
        return self

    def _given(self, width: int) -> list[Sequence[Any] | None]:
        """The list of public categories of each column, or None; a ValueError as for ``fit``."""
        known = [None] * width if self.categories is None else self.categories
        given: list[Sequence[Any] | None] = list(known)
        if len(given) != width or any(isinstance(names, str) for names in given):
            raise ValueError(
                "categories must be one list of public categories for each column of X, or None "
                "for a column whose categories are not public. Fix: categories=[[...], None, ...]."
            )
        for column, names in enumerate(given):
            if names is not None and (
                len({text_of(name) for name in names}) != len(names) or not names
            ):
                raise ValueError(
                    f"categories[{column}] must name each category once, and at least one; numbers "
                    "are compared as numbers, so that '1.0' is 1."
                )
        return given

    def _frequent(
        self, columns: NDArray[np.object_], counted: Sequence[int]
    ) -> dict[int, list[str]]:
        """The numbers of the buckets that hold clearly more than noise, by column; charged."""
        buckets = whole_number("buckets", self.buckets, least=2)
        if buckets > 1 << 16 or not 0 <= self.least_share < 1:
            raise ValueError(
                "buckets must be at most 65536, and least_share a number in [0, 1), got "
                f"{self.buckets!r} and {self.least_share!r}."
            )
        price = self._price(len(columns))
        counts = np.stack(
            [np.bincount(_buckets(columns[:, i], buckets), minlength=buckets) for i in counted]
        )
        bound = self.norm_bound(columns.shape[1])
        released = self._released(counts.ravel().astype(np.float64), bound, price)
        noise = released.deviation * float(-ndtri(FALSE_FINDS / counts.size))
        kept = released.values.reshape(counts.shape) > max(noise, self.least_share * price.n)
        return {
            column: [str(bucket) for bucket in np.flatnonzero(row)]
            for column, row in zip(counted, kept, strict=True)
        }

    def transform(self, X: Any) -> Any:
        """Shape (n, categories of all columns); a value that is no category gives zeros."""
        check_is_fitted(self)
        columns = self._columns(X, reset=False)
        places = np.empty(columns.shape, dtype=np.int64)
        before = 0
        for i, names in enumerate(self.categories_):
            values = columns[:, i]
            if i in self.counted_:
                values = _buckets(values, self.buckets).astype(str)
            place = {text_of(name): before + j for j, name in enumerate(names)}
            places[:, i] = [place.get(value, -1) for value in values.tolist()]
            before += len(names)
        row, column = np.nonzero(places >= 0)
        ones = (np.full(len(row), float(self.scale)), (row, places[row, column]))
        encoded = csr_array(ones, shape=(len(places), before))
        return encoded if self.sparse_output else encoded.toarray()

    def get_feature_names_out(
        self, input_features: Sequence[str] | None = None
    ) -> NDArray[np.object_]:
        """``column_category`` for every column of the result, or ``column_bucket17``."""
        check_is_fitted(self)
        numbered = [f"x{i}" for i in range(self.n_features_in_)]
        own = list(getattr(self, "feature_names_in_", numbered))
        names = own if input_features is None else list(input_features)
        if len(names) != len(own) or (hasattr(self, "feature_names_in_") and names != own):
            raise ValueError(
                f"input_features must be the {self.n_features_in_} columns of fit, in order."
            )
        found = [
            f"{name}_{'bucket' * (i in self.counted_)}{category}"
            for i, (name, known) in enumerate(zip(names, self.categories_, strict=True))
            for category in known
        ]
        return np.array(found, dtype=object)

    def _columns(self, x: Any, *, reset: bool) -> NDArray[np.object_]:
        """X as texts, shape (n, columns); its columns must be those of fit, in the same order.

        **Guarantee.** A value's text does not depend on other records, by which a program chooses
        whether a column of whole numbers holds integers, floats or texts; see `text_of`.
        """
        found: NDArray[Any] = checked_table(
            self, x, reset=reset, dtype=object, ensure_all_finite=False, ensure_min_samples=1
        )
        texts = np.empty(found.size, dtype=object)  # np.str_ drops NUL at the end of a text
        texts[:] = [text_of(value) for value in found.ravel()]
        return texts.reshape(found.shape)


def category_name(category: object) -> str:
    """A category's name: a text as it was given."""
    return category if isinstance(category, str) else text_of(category)


def in_bytes(name: str) -> bytes:
    """UTF-8, also of halves of characters, about which an error would quote the value."""
    return str(name).encode(errors="surrogatepass")


def _buckets(values: NDArray[np.object_], buckets: int) -> NDArray[np.int64]:
    """The bucket of each value, by a public hash; shape (n,)."""
    names, place = np.unique(values, return_inverse=True)
    hashed = [
        int.from_bytes(hashlib.blake2b(in_bytes(name), digest_size=8).digest()) % buckets
        for name in names
    ]
    return np.array(hashed, dtype=np.int64)[place.ravel()]
