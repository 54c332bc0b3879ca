"""Assumptions of a guarantee: enforced in code, taken on somebody's word, or unproven."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Assumption:
    """One thing that a guarantee rests on: enforced in code, taken on trust, or unproven.

    Attributes:
        of_program: about the program alone, its loop, loss and model, and no data: whoever knows
            which program ran needs no such line.
    """

    kind: Literal["enforced", "trusted", "unproven"]
    text: str
    of_program: bool = field(default=False, compare=False)


def enforced(text: str) -> Assumption:
    return Assumption("enforced", text)


def trusted(text: str, *, of_program: bool = False) -> Assumption:
    return Assumption("trusted", text, of_program)


NOISE = enforced("the noise comes from a cryptographic stream, right to 8 standard deviations")


ONE_RECORD_A_PERSON = trusted(
    "one record is the unit of privacy: no person contributed more than one"
)
PLACES_ARE_KEPT = trusted(
    "each item of the data set keeps its place for the whole run, resumed parts included: it is "
    "not shuffled or split anew on the way"
)
METHOD_OF_OTHERS = (
    "the method comes from the package {!r}, which the SHA-256 of dpoptim does not cover"
)
CODE_OF_OTHERS = "on trust that the code of the package {!r} does what it says"  # a note
OWNERS_ARE_NAMED = trusted("persons names the owner of every row, and nobody goes by two names")


def bounded(norm: float) -> Assumption:
    """State the bound on what each record adds to a sum."""
    return enforced(f"each record adds at most {norm:g} to the sum, rounding included")
