"""Assumptions of a run of the command line, beside those of its plan and of the engine."""

from collections.abc import Iterable

from dpoptim.assumptions import Assumption, trusted
from dpoptim.data import Data, Schema
from dpoptim.printable import printable
from dpoptim.training.assumptions import of_own_program

OTHER_WEIGHTS = trusted(
    "the weights in model.pt, which are not known to be those that the run left, were made of what "
    "this run released and of public things alone"
)
BY_THE_CLOCK = trusted("how many steps a clock left time for tells nothing about the records")
PUBLIC_WEIGHTS = trusted(
    "the weights of the classes are public: nobody counted these records for them"
)

SECRET_MOVES = trusted(
    "images are moved by torch's generator, seeded in secret, with 32 bits on CPUs: nobody tries "
    "all seeds"
)
BY_ANOTHER = "before it was taken up again, the run was trained by the dpoptim whose SHA-256 is {}"


MOST_NAMED = 8  # columns, of those that a schema drops


def nobody_dropped(data: Data) -> tuple[Assumption, ...]:
    """Columns that a schema without a person drops: one may say whose record each is."""
    schema = data.encoding
    if not isinstance(schema, Schema) or schema.person is not None:
        return ()
    dropped = [printable(column.name) for column in schema.columns if column.kind == "drop"]
    if not dropped:
        return ()
    more = f", and {len(dropped) - MOST_NAMED} more" if len(dropped) > MOST_NAMED else ""
    names = ", ".join(dropped[:MOST_NAMED]) + more
    return (trusted(f"no dropped column says which person's a record is (dropped: {names})"),)


def basis_of_run(
    basis: Iterable[Assumption], data: Data, *others: Assumption, views: int = 1
) -> tuple[Assumption, ...]:
    """The guarantee's basis, for whoever knows only that this package trained its own model.

    Args:
        basis: as whoever wrote a loop around the same plan would have it.
        others: what the run rests on beside it.
    """
    of_run = (
        *((PUBLIC_WEIGHTS,) if data.class_weights is not None else ()),
        *((SECRET_MOVES,) if views > 1 else ()),
        *nobody_dropped(data),
    )
    return of_own_program((*basis, *of_run, *others))
