"""Persons as units: at most m records of each take part, gathered so that a person is one item of the data set."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from dpoptim.data.dataset import Data, Floats, Labels
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class PersonRecords:
    """Up to ``m`` records of each person, padded with records of weight 0.

    Attributes:
        x: float32 of shape (persons, m, ...).
        y: shape (persons, m); 0 where there is no record.
        weights: float32 of shape (persons, m); 1 over the person's number of records taken, or 0. So a person's loss is
            the mean over its records, and its gradient, clipped once, does not grow with their number.
    """

    x: Floats
    y: NDArray[np.int64] | NDArray[np.float32]
    weights: Floats

    def dataset(self) -> TensorDataset:
        """One item a person: its records, their labels and their weights."""
        return TensorDataset(torch.from_numpy(self.x), torch.from_numpy(self.y), torch.from_numpy(self.weights))


def choose_records(persons: Labels, most: int, coins: KeyStream) -> Labels:
    """Which records take part: int64 of shape (persons, most), record numbers, or -1 where there is none.

    **Guarantee.** A person's records are chosen uniformly at random by coins of its own records alone: not by their
    values, and not by who else is there. So data sets that differ in one person differ in one row of the result, once
    the coins are those of the records that both have.

    Args:
        persons: whose record each is, 0, 1, ...; every number occurs.
        most: m, a public number of at least 1.
    """
    drawn = np.empty(len(persons), dtype=np.uint64)
    coins.words(drawn)
    order = np.lexsort((drawn, persons))
    sorted_persons = persons[order]
    first = np.searchsorted(sorted_persons, np.arange(persons.max() + 1))
    rank = np.arange(len(persons)) - first[sorted_persons]
    chosen: Labels = np.full((int(persons.max()) + 1, most), -1, dtype=np.int64)
    kept = rank < most
    chosen[sorted_persons[kept], rank[kept]] = order[kept]
    return chosen


def gather_persons(data: Data, most: int, coins: KeyStream) -> PersonRecords:
    """The records of each person, at most ``most`` of them, as one item; see `choose_records`.

    Raises:
        ValueError: records of the data set belong to nobody.
    """
    if data.persons is None:
        raise ValueError('the data set has no persons; name their column in the schema (kind = "person").')
    chosen = choose_records(data.persons, most, coins)
    there = chosen >= 0
    shape = (len(chosen), most) + (1,) * (data.x.ndim - 1)
    x: Floats = np.where(there.reshape(shape), data.x[chosen], np.float32(0))
    y = np.where(there, data.y[chosen], data.y.dtype.type(0))
    weights: Floats = (there / there.sum(1, keepdims=True)).astype(np.float32)
    return PersonRecords(x, y, weights)
