"""Guarantees: what a run promised, with everything that its meaning depends on."""

import dataclasses
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

from dp_accounting import NeighboringRelation

from dpoptim.notebook import as_table

SEEDED = "seeded: not for release"  # a note on runs whose noise was made repeatable
_RELATIONS = {
    "add-or-remove-one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": NeighboringRelation.REPLACE_ONE,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
}
_NAMES = {relation: name for name, relation in _RELATIONS.items()}


def parse_neighboring(value: str | NeighboringRelation) -> NeighboringRelation:
    """The neighbouring relation that `value` names, or is.

    * "add-or-remove-one": the data sets differ by the presence of one record;
    * "replace-one": one record has another value;
    * "zero-out": one record contributes nothing (`dp_accounting` calls it replace-special).

    Args:
        value: a name, or the relation itself.

    Returns:
        the relation, as `dp_accounting` knows it.

    Raises:
        ValueError: anything else.

    Examples:
        >>> from dpoptim.accounting import parse_neighboring
        >>> parse_neighboring("zero-out").name
        'REPLACE_SPECIAL'
    """
    if isinstance(value, NeighboringRelation):
        return value
    if isinstance(value, str) and value in _RELATIONS:
        return _RELATIONS[value]
    raise ValueError(
        f"neighboring: expected one of {', '.join(map(repr, _RELATIONS))}, got {value!r}"
    )


def neighboring_name(relation: str | NeighboringRelation) -> str:
    """The name of a relation, as `parse_neighboring` takes it.

    Args:
        relation: or its name.

    Returns:
        "add-or-remove-one", "replace-one" or "zero-out".

    Raises:
        ValueError: no such relation.

    Examples:
        >>> from dpoptim.accounting import neighboring_name, parse_neighboring
        >>> neighboring_name(parse_neighboring("zero-out"))
        'zero-out'
    """
    return _NAMES[parse_neighboring(relation)]


def neighbours_differ_by(relation: str | NeighboringRelation) -> float:
    """How far a sum moves between neighbours at most, over the bound on one record's norm."""
    return 2.0 if parse_neighboring(relation) is NeighboringRelation.REPLACE_ONE else 1.0


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, and what the claim rests on.

    Attributes:
      epsilon: >= 0; `inf` says that nothing is guaranteed.
      delta: in [0, 1].
      neighboring: the relation between data sets; a name is accepted and stored as the relation.
      accountant: what computed the numbers: "PLD", "tilted PLD", "RDP", "exact Gaussian",
          "order statistics" (of a selection), a filter's name.
      status: "proven", or what is known instead, such as "unproven (counterexample known)".
      notes: what the reader must know beside the numbers, such as "seeded: not for release".
      unit: whose data the relation changes: "record", or "user", "document", ...

    `str` rounds epsilon and delta up, and never leaves out a note or a status other than "proven".

    Examples:
        >>> from dpoptim import Guarantee
        >>> print(Guarantee(1.2341, 1e-5, "zero-out", "PLD", unit="user"))
        epsilon=1.24 at delta=1e-05 (zero-out, PLD, per user)
    """

    epsilon: float
    delta: float
    neighboring: NeighboringRelation
    accountant: str
    status: str = "proven"
    notes: tuple[str, ...] = ()
    unit: str = "record"

    @classmethod
    def without_noise(cls, neighboring: str, delta: float, unit: str = "record") -> "Guarantee":
        """The guarantee of a run whose noise is off: none."""
        status = "no privacy: the noise is off"
        relation = parse_neighboring(neighboring)
        return cls(math.inf, delta, relation, "none", status=status, unit=unit)

    def __post_init__(self) -> None:
        notes: object = self.notes  # what a caller without a type checker may have passed
        if isinstance(notes, str):
            raise TypeError(
                f"notes: expected a tuple of strings, got {notes!r}; write ({notes!r},)"
            )
        for name, value in {
            "epsilon": float(self.epsilon),
            "delta": float(self.delta),
            "neighboring": parse_neighboring(self.neighboring),
            "notes": tuple(self.notes),
        }.items():
            object.__setattr__(self, name, value)
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon: expected a number >= 0, got {self.epsilon}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta: expected a number in [0, 1], got {self.delta}")
        for name, text in [
            ("accountant", self.accountant),
            ("status", self.status),
            ("unit", self.unit),
        ]:
            _require_text(name, text)
        for note in self.notes:
            _require_text("notes", note)

    def __str__(self) -> str:
        basis = [neighboring_name(self.neighboring), self.accountant]
        if self.unit != "record":
            basis.append(f"per {self.unit}")
        text = (
            f"epsilon={rounded_up(self.epsilon)} at delta={_trimmed(self.delta)} "
            f"({', '.join(basis)})"
        )
        remarks = ([] if self.status == "proven" else [self.status]) + list(self.notes)
        return "; ".join([text, *remarks])

    def __repr__(self) -> str:
        return f"Guarantee({self})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        lines = [
            f"epsilon = {rounded_up(self.epsilon)} at delta = {_trimmed(self.delta)}",
            f"  protects  one {self.unit} ({neighboring_name(self.neighboring)})",
            f"  status  {self.status}, by {self.accountant}",
            *(f"  note  {note}" for note in self.notes),
        ]
        return as_table("\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """A dictionary that strict JSON can hold; `from_json` gives an equal guarantee back."""
        return {
            # Strict JSON has no infinity.
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf",
            "delta": self.delta,
            "neighboring": neighboring_name(self.neighboring),
            "accountant": self.accountant,
            "status": self.status,
            "notes": list(self.notes),
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Guarantee":
        """Read what `to_json` wrote. ValueError: missing, surplus or wrong entries."""
        names = {field.name for field in dataclasses.fields(cls)}
        if data.keys() != names:
            raise ValueError(
                f"data: a guarantee has the entries {sorted(names)}, got {sorted(data)}"
            )
        return cls(**data)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a non-empty string, got {value!r}")


MOST_DIGITS = 400  # before the point, that a float has, and some


def rounded_up(value: float, digits: int = 3) -> str:
    """So many significant digits (or all digits before the point), never below `value`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    # repr, not the binary value: 1e-5 is a hair above its decimal, and would be shown as 1.01e-05.
    exact = Decimal(repr(value))
    last = Decimal((0, (1,), min(exact.adjusted() - digits + 1, 0)))
    with localcontext() as digits_at_hand:
        digits_at_hand.prec = MOST_DIGITS
        return f"{exact.quantize(last, rounding=ROUND_CEILING):f}"


def _trimmed(value: float) -> str:
    return f"{float(rounded_up(value)):g}"
