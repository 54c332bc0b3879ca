"""Kinds of records that a score is of: kept from the training, or among those it had."""

from dataclasses import replace
from typing import Literal

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import scope_on_ledger
from dpoptim.printable import printable

Records = Literal["hold-out", "training"]
LABEL = "evaluation"
APART = "on trust: the model was not trained on these records"
TRAINING = "of records that the model was trained on: no measure of how it does on new ones"
NO_LEDGER = "this evaluation alone: no ledger counts what else these records cost"


def kind_of_records(said: Records | None, ledger: Ledger | None, label: str) -> Records:
    """Kind of records, by what is public; a doubt is for the caller to settle.

    Args:
        said: by the caller. label: of the evaluation to come.

    Raises:
        ValueError: nothing was said, and the ledger holds charges that are no evaluations; or what
            was said cannot be, or is none of both.
    """
    labels = [] if ledger is None else [entry.label for entry in ledger.entries()]
    others = [one for one in labels if one != label and not one.startswith(LABEL)]
    if said is None:
        if others:
            raise ValueError(
                f"the ledger holds charges that are no evaluations, such as "
                f"{printable(others[-1])!r}, so these records may be those that the model was "
                "trained on, whose scores say nothing of new ones. Fix: records='hold-out', if a "
                "rule or coin for each record alone kept them from the training (on your word, "
                "which is written down); records='training', if not; or the ledger of a hold-out "
                "of its own."
            )
        return "hold-out"
    if said not in ("hold-out", "training"):
        raise ValueError(f"records must be 'hold-out' or 'training', got {said!r}.")
    if said == "training" and not others:
        raise ValueError(
            "records='training': their ledger counts the training, too, and none is named that "
            "holds its charge. Fix: ledger=, the training's own; or a hold-out."
        )
    return said


def with_notes(
    guarantee: Guarantee, said: tuple[str, ...], records: Records, ledger: Ledger | None
) -> Guarantee:
    """The guarantee of an evaluation with what is said of it, of its records and its ledger."""
    scope = (NO_LEDGER,) if ledger is None else scope_on_ledger(ledger, guarantee.delta)
    trusted = {"hold-out": APART, "training": TRAINING}[records]
    return replace(guarantee, notes=(*guarantee.notes, *said, *scope, trusted))
