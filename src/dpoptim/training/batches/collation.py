"""Batches of records as DataLoader makes them; of dataclasses too, which it would refuse."""

import copy
import dataclasses
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import collate_by_type, collated_types


class Dataclass(ABC):  # noqa: B024  # a type to ask about, without methods
    """Any dataclass that is no mapping: Hugging Face's outputs are both."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return dataclasses.is_dataclass(kind) and not issubclass(kind, Mapping)


def collate_records(records: list[Any]) -> Any:
    """Collate as ``torch.utils.data.default_collate``, dataclasses included.

    These, nested ones as well, become one of their kind with each field collated.

    Raises:
        PrivacyError: the records do not fit together; how, and where, is not told.
        TypeError: of a kind that PyTorch collates none of.

    **Guarantee.** None: private. No field depends on another one.
    """
    try:
        return collate_by_type(records, collate_fn_map=COLLATED)
    except Exception as error:  # with two records' lengths, or a record's place in the batch
        if str(error).startswith("default_collate"):
            raise
        raise PrivacyError(
            "the records make no batch: they have tensors of different shapes, values of "
            "different kinds, or other entries than the first. Fix: dpoptim.attach(..., "
            "collate_fn=...), which pads each record to the same length; or a data set whose "
            "records are all made alike."
        ) from None


@dataclass(frozen=True)
class CollatePresent:
    """Collates records all of which are there; see `refuse_missing`."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, records: list[Any]) -> Any:
        refuse_missing(records)
        return self.collate(records)


def refuse_missing(records: Iterable[Any]) -> None:
    """Refuse a data set some record of which is None; which one is not told.

    Raises:
        PrivacyError: a record of these is.
    """
    if any(record is None for record in records):
        raise PrivacyError(
            "a record of train_set is None. Fix: leave such records out of the data set, before "
            "the plan is made for its n."
        )


def collate_dataclasses(records: list[Any], *, collate_fn_map: Any) -> Any:
    batch = copy.copy(records[0])
    for field in dataclasses.fields(batch):
        values = [getattr(record, field.name) for record in records]
        # also where the class is frozen
        object.__setattr__(
            batch, field.name, collate_by_type(values, collate_fn_map=collate_fn_map)
        )
    return batch


COLLATED = {**collated_types, Dataclass: collate_dataclasses}
