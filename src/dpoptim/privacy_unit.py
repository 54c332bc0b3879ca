"""Whom a guarantee protects: a record, or a person who owns several."""

from dataclasses import dataclass

from dpoptim.arguments import whole_number


@dataclass(frozen=True)
class Unit:
    """The thing that neighbouring data sets differ in one of.

    Attributes:
        name: ``"record"`` or ``"person"``.
        most_rows: a public bound on how many rows of a unit take part in a step; they are clipped
            together, once.
    """

    name: str
    most_rows: int = 1

    def __post_init__(self) -> None:
        if self.name not in ("record", "person"):
            raise ValueError(f"unit must be 'record' or 'person', got {self.name!r}.")
        whole_number("most_rows of the unit", self.most_rows, least=1)


RECORD = Unit("record")
