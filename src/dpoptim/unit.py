"""Whom a guarantee protects: a record, or a person who owns several."""

from dataclasses import dataclass
from typing import Literal

from dpoptim.arguments import whole_number


@dataclass(frozen=True)
class Unit:
    """What neighbouring data sets differ in one of.

    Attributes:
        name: for readers, such as ``"record"`` or ``"person"``.
        most_records: a public bound on how many records of a unit take part; they are clipped together, once.
    """

    name: str
    most_records: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"unit: its name must be text, got {self.name!r}.")
        whole_number("unit: most_records", self.most_records, least=1)

    def basis(self) -> tuple[tuple[Literal["enforced", "trusted"], str], ...]:
        """What a guarantee for such units rests on."""
        if self == RECORD:
            return (("trusted", "one record is the unit of privacy: no person contributed more than one"),)
        return (
            (
                "enforced",
                f"at most {self.most_records} records of a {self.name} take part, chosen by its own coins without a look "
                f"at them; a {self.name} is sampled as a whole, and its gradient is clipped once",
            ),
            ("trusted", f"all records of a {self.name} carry the same identifier, and nobody else's do"),
        )


RECORD = Unit("record")
