"""Meaning of a sampler's index: a row, a record of several, or a person owning some.

A *unit* is what the guarantee protects. Units are sampled, never rows; in a batch every unit has K
rows, one after the other, of which some may not be there; its gradient is the mean (or sum) of
those that are, clipped once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.arguments import whole_number
from dpoptim.assumptions import (
    PLACES_ARE_KEPT,
    Assumption,
    enforced,
)
from dpoptim.distributed.agreement import sample_of
from dpoptim.gradients.rows_of_records import RowsOfRecords
from dpoptim.missing_values import is_missing
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.privacy_unit import RECORD, Unit
from dpoptim.runtime.torch_internals import pytree
from dpoptim.sampling import Indices
from dpoptim.training.batches.collation import collate_records, refuse_missing
from dpoptim.training.batches.repeated_records import (
    refuse_repeated_records,
    warn_of_overlapping_windows,
)

NO_ROW = -1  # in the place of a row that is not there


def texts_of(names: NDArray[Any]) -> list[str]:
    """Strings, or bytes in whatever encoding, as strings; shape (names,)."""
    return [name if isinstance(name, str) else name.decode("latin-1") for name in names.tolist()]


def array_of(owners: Any) -> NDArray[Any]:
    """Owners of rows as they are given, "" where one is masked; without an axis if ragged."""
    try:
        found = np.asarray(owners.cpu() if isinstance(owners, Tensor) else owners)
    except ValueError:  # lists of unequal lengths; NumPy's message tells how many rows there are
        return np.empty((), dtype=object)
    masked = np.ma.getmaskarray(owners) if isinstance(owners, np.ma.MaskedArray) else False
    return np.where(masked, "", found.astype(str)) if np.any(masked) else found


@dataclass(frozen=True)
class Persons:
    """Owners of rows, in the order of their first rows.

    Names decide nothing. Who replaces somebody has other rows, so may stand elsewhere: nothing that
    is public may follow from these places under replace-one.

    Attributes:
        rows: row numbers, owner by owner, shape (rows,).
        ends: where each person's rows end in it, shape (persons,).
        most: rows that a person brings to a step, at most; public.
        names: numbers or strings, shape (persons,); private.
    """

    rows: Indices
    ends: Indices
    most: int
    names: NDArray[Any]

    @classmethod
    def of(cls, owners: Any, rows: int, most: int, data: str = "train_set") -> "Persons":
        """Make persons of each row's owner, numbers or strings, (rows,), of ``data``, for messages.

        Raises:
            ValueError: not one owner for each row, or a row without one. No message quotes one.
        """
        names = array_of(owners)
        if names.ndim == 1 and names.dtype.kind in "OUS":
            if any(name[-1:] in ("\0", b"\0") for name in owners if isinstance(name, str | bytes)):
                raise ValueError(  # an array would drop it
                    "persons has a name that ends in NUL, without which it may be another "
                    "person's. Fix: persons=[repr(name) for name in names]."
                )
            names = names.astype(str) if all(isinstance(name, str) for name in names) else names
        if names.ndim != 1 or len(names) != rows:
            raise ValueError(
                f"persons must name the owner of each item of {data}: one axis, as long as "
                f"{data}. Fix: persons=[... one number or string for each item ...]."
            )
        if rows and names.dtype.kind not in "iuUS":
            raise ValueError(
                f"persons must be whole numbers or strings, got {names.dtype}: what else is equal, "
                "or missing, is unclear. Fix: persons=[str(name) for name in names], after giving "
                "each row without an owner one of its own."
            )
        different, first, owner, counts = np.unique(
            names, return_index=True, return_inverse=True, return_counts=True
        )
        if names.dtype.kind in "US" and any(map(is_missing, texts_of(different))):
            raise ValueError(
                "persons has rows without an owner (empty, or 'nan', 'None', 'NA' or the like as "
                "text), who would all be one person. Fix: give each of them an owner of its own, "
                "or leave it out; where people are called so, and no row lacks an owner: "
                "persons=['=' + name for name in names]."
            )
        met = np.argsort(first)
        numbers = np.argsort(met)[owner]
        order = np.argsort(numbers, kind="stable").astype(np.int64)
        return cls(order, np.cumsum(counts[met]), most, different[met])

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def numbers(self) -> Indices:
        """The number of each row's owner, as they are met; shape (rows,)."""
        found = np.empty(len(self.rows), dtype=np.int64)
        found[self.rows] = np.repeat(np.arange(len(self)), np.diff(self.ends, prepend=0))
        return found

    @property
    def first_rows(self) -> Indices:
        """The first row of each; shape (persons,). Private."""
        return self.rows[[0, *self.ends[:-1]]]

    def rows_of(self, person: int) -> Indices:
        """Row numbers of one person. Private."""
        return self.rows[self.ends[person - 1] if person else 0 : self.ends[person]]

    @property
    def digest(self) -> str:
        """Whose rows are whose, hashed; as private as that. For processes to compare."""
        return hashlib.sha256(self.rows.tobytes() + self.ends.tobytes()).hexdigest()

    def bring(self, coins: KeyStream, persons: Indices) -> Indices:
        """Row numbers of persons, (persons, most); `NO_ROW` fills up those who have fewer.

        **Guarantee.** Which rows a person brings depends on that person's own rows and coins: all
        of them, or as many as may be, each choice as likely. The values of rows are not looked at.
        Private.
        """
        starts = np.concatenate([[0], self.ends[:-1]])[persons]
        counts = self.ends[persons] - starts
        owner = np.repeat(np.arange(len(persons)), counts)
        # among the owner's rows
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        own = self.rows[starts[owner] + place]
        words = np.empty(len(owner), dtype=np.uint64)
        coins.words(words)
        by_coin = np.lexsort((words, owner))  # each person's rows in an order of its own coins
        chosen = place < self.most
        brought = np.full((len(persons), self.most), NO_ROW, dtype=np.int64)
        brought[owner[chosen], place[chosen]] = own[by_coin][chosen]
        return brought


@dataclass(frozen=True)
class Units:
    """The thing that is sampled, protected and clipped.

    Attributes:
        count: of units in the data set. Private under add-or-remove-one.
        rows: of a unit.
        persons: who own the rows of the data set; None: every item of it is a unit.
    """

    count: int
    rows: RowsOfRecords
    persons: Persons | None

    @property
    def name(self) -> str:
        return "record" if self.persons is None else "person"

    @property
    def stacked(self) -> int:
        """How many rows an item of the data set holds."""
        return self.rows.per_record if self.persons is None else 1

    def bring(self, coins: KeyStream, units: Indices) -> Indices:
        """The items of these units in a step: shape (units,), or each person's, (units, K)."""
        return units if self.persons is None else self.persons.bring(coins, units)

    def items_of(self, units: int) -> int:
        """Items of the data set that so many units bring."""
        return units if self.persons is None else units * self.rows.per_record

    def a_row(self, train_set: Dataset[Any]) -> Any:
        """A row of the data set, for its shapes and dtypes."""
        item = item_of(train_set, 0)
        return item if self.stacked == 1 else split_rows(item, self.stacked)[0]

    def some_rows(self, train_set: Dataset[Any], unit: int) -> list[Any]:
        """As many rows as a unit brings to a step; those of who has fewer, repeated. Private."""
        K = self.rows.per_record
        if self.persons is not None:
            own = self.persons.rows_of(unit)
            return [item_of(train_set, int(own[k % len(own)])) for k in range(K)]
        item = item_of(train_set, unit)
        return split_rows(item, K) if K > 1 else [item]

    def stated(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee, with its unit named."""
        return replace(guarantee, unit=self.name)

    def planned(self, plan: Plan) -> Plan:
        """The plan, which may not have been told of persons, with its unit named."""
        told = self.persons is None or plan.unit != RECORD
        return plan if told else replace(plan, unit=Unit(self.name, self.rows.per_record))

    def basis(self, plan: Plan) -> tuple[Assumption, ...]:
        """The guarantee's basis, with knowledge of the unit beside the plan."""
        K, how, planned = self.rows.per_record, self.rows.reduction, self.planned(plan).basis
        if self.persons is None:
            text = f"a record's {K} rows are clipped as one gradient, their {how}"
            return (*planned, enforced(text)) if K > 1 else planned
        return (
            *(item for item in planned if item != PLACES_ARE_KEPT),
            PLACES_ARE_KEPT,
            enforced("persons are sampled, not rows"),
            enforced(
                f"of a person's rows at most {K} a step take part (rows_per_record={K}), drawn "
                f"anew by the person's own coins, and clipped as one gradient, their {how}"
            ),
        )

    def places_in(self, train_set: Dataset[Any], plan: Plan) -> str:
        """A digest of what is known of who is where; "" of a run that does not rest on it. Private.

        By coins tossed anew in each step records may lie anywhere, but not rows of persons.
        """
        if self.persons is not None:
            return f"{self.persons.digest}, {sample_of(train_set)}"
        return sample_of(train_set) if plan.rests_on_places else ""


def units_of(
    train_set: Dataset[Any],
    rows_per_record: int,
    rows_reduction: str,
    persons: Sequence[Any] | None,
) -> Units:
    """The units of a data set.

    Raises:
        ValueError, TypeError: an argument of `attach` that does not fit, by name.
        PrivacyError: the data set shows one record at two of its places.
    """
    K = whole_number("rows_per_record", rows_per_record, least=1)
    if rows_reduction not in ("mean", "sum"):
        raise ValueError(f"rows_reduction must be 'mean' or 'sum', got {rows_reduction!r}.")
    rows, items = RowsOfRecords(K, rows_reduction), len(train_set)  # type: ignore[arg-type]
    if persons is not None:
        owners = Persons.of(persons, items, K)
        return Units(len(owners), rows, owners)
    refuse_repeated_records(train_set)
    warn_of_overlapping_windows(train_set)
    if K > 1:
        split_rows(train_set[0], K)
    return Units(items, rows, None)


def item_of(train_set: Dataset[Any], index: int) -> Any:
    """An item, which must be there. Private."""
    item = train_set[index]
    refuse_missing([item])
    return item


def split_rows(item: Any, K: int) -> list[Any]:
    """The K rows of a record: the k-th of each (K, ...) tensor or array; the rest repeated.

    Raises:
        ValueError: a tensor or array has another first axis.
    """
    leaves, structure = pytree.tree_flatten(item)
    stacked = [isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 for leaf in leaves]
    if not any(stacked) or any(
        len(leaf) != K for leaf, each in zip(leaves, stacked, strict=True) if each
    ):
        raise ValueError(
            f"rows_per_record={K}, but an item of the data set does not hold {K} rows: every "
            "tensor or array in it must have them on its first axis, unless it is a single value "
            f"that they share. Fix: dpoptim.data.views(dataset, transform, {K}), or stack the rows "
            "of a record."
        )
    columns = [leaf if each else [leaf] * K for leaf, each in zip(leaves, stacked, strict=True)]
    return [pytree.tree_unflatten([column[k] for column in columns], structure) for k in range(K)]


@dataclass(frozen=True)
class CollateRows:
    """Collates the rows of records, one record's after the other's."""

    K: int
    collate: Callable[[list[Any]], Any] | None

    def __call__(self, items: list[Any]) -> Any:
        return (self.collate or collate_records)(
            [row for item in items for row in split_rows(item, self.K)]
        )


def rows_of_tensors(tensors: Sequence[Tensor], index: Tensor, K: int) -> list[Tensor]:
    """The batch that `CollateRows` makes of these records of a `TensorDataset`."""
    some_empty = NO_ROW in index
    there = index.clamp(min=0) if some_empty else index
    taken = [tensor.index_select(0, there.to(tensor.device)) for tensor in tensors]
    if some_empty:
        empty = (index == NO_ROW).nonzero()[:, 0]
        for rows, tensor in zip(taken, tensors, strict=True):
            one_number = tensor.dim() == (1 if K == 1 else 2)
            rows[empty.to(rows.device)] = made_up(tensor, one_number=one_number)
    if K == 1:
        return taken
    return [t.flatten(0, 1) if t.dim() > 1 else t.repeat_interleave(K) for t in taken]


def made_up(like: Tensor, *, one_number: bool) -> Tensor:
    """The record to make empty slots of: 1, or 0 where integers may be indices.

    Args:
        one_number: what is one number a record is more often a length or a label, which are 1.
    """
    value = float(one_number or like.is_floating_point())
    return torch.full((), value, dtype=like.dtype, device=like.device)


def present_rows(brought: Indices) -> tuple[Indices, Tensor | None]:
    """The items to load, in order, and which of them are there, (units, K); None: all.

    A row that is not there is filled up with its person's first.
    """
    if brought.ndim == 1:
        return brought, None
    there = brought != NO_ROW
    return np.where(there, brought, brought[:, :1]).reshape(-1), torch.from_numpy(there)
