"""Settings fixed when a ledger is made: data set, relation, budget and its filter."""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Real

from dpoptim.accounting.budget import Budget, FilterKind
from dpoptim.accounting.guarantee import neighboring_name
from dpoptim.errors import LedgerError

PERSONS = ", per person"  # ends the name of a data set whose ledger counts what persons spend
ID, SHA256 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Settings:
    """One row, written once; the random id `ledger` tells it from another at the same path."""

    ledger: str
    created: str  # UTC, ISO 8601
    dataset: str
    neighboring: str
    epsilon: float | None
    delta: float | None
    filter: str
    renyi_order: float | None

    @property
    def unit(self) -> str:
        """Whom runs protect that do not say: by the name that the command line gives."""
        return "person" if self.dataset.endswith(PERSONS) else "record"

    @property
    def budget(self) -> Budget | None:
        """The stored budget with its stored order, whatever `filter_order` says later."""
        if self.epsilon is None or self.delta is None:
            return None
        if self.filter == "renyi" and self.renyi_order is not None:
            return Budget(self.epsilon, self.delta, self.neighboring, "renyi", self.renyi_order)
        if self.filter == "basic":
            return Budget(self.epsilon, self.delta, self.neighboring, "basic")
        raise LedgerError(f"unknown budget filter {self.filter!r} in the ledger; upgrade dpoptim")


@dataclass(frozen=True)
class Wanted:
    """Settings named when opening a ledger; None means "whatever is stored" or the default.

    Raises ValueError for a value out of range.
    """

    dataset: str | None
    epsilon: float | None
    delta: float | None
    neighboring: str | None
    filter: FilterKind | None

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError(
                f"epsilon={self.epsilon}, delta={self.delta}: a budget needs both; give both or "
                "neither. Fix: epsilon=1.0, delta=1e-6, say"
            )
        given: list[tuple[str, object, float]] = [
            ("epsilon", self.epsilon, 1.0),
            ("delta", self.delta, 1e-6),
        ]
        for name, value, fix in given:
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ValueError(
                    f"{name} of a ledger must be a number, got {value!r}. Fix: {name}={fix}, say, "
                    "a number without quotation marks."
                )
        if self.filter not in (None, "renyi", "basic"):
            raise ValueError(f'filter: expected "renyi" or "basic", got {self.filter!r}')
        if self.dataset is not None and not self.dataset:
            raise ValueError("dataset: expected a name, got an empty string")

    def as_new(self, *, dataset: str, created: str) -> Settings:
        """The settings of a new ledger, with defaults for what was not named."""
        relation = neighboring_name(self.neighboring or "add-or-remove-one")
        kind = self.filter or "renyi"
        budget = None
        if self.epsilon is not None and self.delta is not None:
            budget = Budget(self.epsilon, self.delta, relation, kind)
        return Settings(
            ledger=uuid.uuid4().hex,
            created=created,
            dataset=self.dataset or dataset,
            neighboring=relation,
            epsilon=None if budget is None else float(budget.epsilon),
            delta=None if budget is None else float(budget.delta),
            filter=kind,
            renyi_order=None if budget is None else budget.order,
        )

    def require_agreement(self, stored: Settings, where: str) -> None:
        """Raise LedgerError if something named differs from what the ledger was made with."""
        for name in ("dataset", "epsilon", "delta", "neighboring", "filter"):
            wanted, kept = getattr(self, name), getattr(stored, name)
            if wanted is not None and wanted != kept:
                what = {"epsilon": "a budget of epsilon", "delta": "a budget of delta"}.get(
                    name, name
                )
                if name == "dataset":
                    raise LedgerError(f"{where}: {other_name(str(kept), str(wanted))}")
                if name == "neighboring":
                    raise LedgerError(
                        f"{where}: this ledger was made with neighboring={kept!r}, not {wanted!r}, "
                        f"which do not add up. Fix: neighboring={kept!r}, or --neighboring {kept}, "
                        "where the method keeps it; or another ledger."
                    )
                raise LedgerError(
                    f"{where}: this ledger was made with {what}={kept!r}, not {wanted!r}, which "
                    f"cannot be changed; leave {'the budget' if what != name else name} out to use "
                    "what is stored, or keep another ledger"
                )


def dataset_of_unit(dataset: str, unit: str) -> str:
    """A data set's name in its ledger: of persons and of records, which do not add up."""
    return dataset.removesuffix(PERSONS) + (PERSONS if unit == "person" else "")


def other_name(kept: str, wanted: str) -> str:
    """Why a ledger is not opened under a name that it was not made with."""
    said = f"this ledger was made with dataset={kept!r}, not {wanted!r}. "
    if kept.endswith(PERSONS) != wanted.endswith(PERSONS):
        return (
            f"{said}A ledger counts what one set of records, or of persons, has spent; the two do "
            "not add up. Fix: name the person column, or leave it out, as then; for others keep "
            "another ledger."
        )
    name = kept.removesuffix(PERSONS)
    return (
        f"{said}A ledger knows its records by that name alone, which on the command line is the "
        f"file's unless --dataset says another. Fix: for the same records --dataset {name!r} (in "
        "Python leave dataset out); for others keep another ledger."
    )


def utc_now() -> str:
    """UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_forms(run: str | None, checkpoints: Sequence[str]) -> None:
    """Raise ValueError unless these are an id, if any, and SHA-256 digests."""
    for argument, texts, form in (
        ("run", [run] if run else [], ID),
        ("checkpoints", checkpoints, SHA256),
    ):
        if not all(isinstance(text, str) and form.fullmatch(text) for text in texts):
            raise ValueError(f"{argument}: expected text in the form {form.pattern}")
