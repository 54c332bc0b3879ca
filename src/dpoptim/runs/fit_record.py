"""The fit of an estimator, a pipeline or a search, as its run directory keeps it: ``plan.json``."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import dp_accounting

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.event_json import event_from_json
from dpoptim.accounting.guarantee import SEEDED, Guarantee
from dpoptim.assumptions import (
    NOISE,
    ONE_RECORD_A_PERSON,
    OWNERS_ARE_NAMED,
    Assumption,
    enforced,
    trusted,
)
from dpoptim.documents import dump, load, with_digest
from dpoptim.estimators.repeats import ALONE, FROM_EARLIER
from dpoptim.plan import Plan
from dpoptim.plan.text import refuse_other_promise, relation_on_trust
from dpoptim.training.assumptions import PACKAGE

FORMAT = "dpoptim.fit/1"
BOUNDED = enforced(
    "whatever a fit sums over records is cut record by record to a bound that is public, and its "
    "whole event was reserved before the first noisy sum"
)
AS_LEFT = trusted(
    "the estimator is as its fit left it: nobody has changed what it learnt, or written anything "
    "private into it"
)
LAST_BITS = trusted("nobody exploits the last bits of noisy numbers, or timing")
UNPROVEN = {  # by note
    FROM_EARLIER: FROM_EARLIER,
    SEEDED: f"{SEEDED}: whoever knows the seed sees the data",
}
OF_CLONES = "fits of it and its clones"  # is in a note about them
CHOSEN = (
    "the only fit that the records decided about: it is one of several of an estimator and its "
    "clones, as a search makes them, whose scores nothing protects"
)
ON_TRUST = "on trust"  # begins, or is in, a note about it


@dataclass(frozen=True)
class FitRecord:
    """Everything that a fit's guarantee follows from; all of it public.

    It has what certificate and report ask a `Plan`.

    Attributes:
        estimator: the class that was fitted, for people.
        n: number of records or persons; exact, but a public estimate under add-or-remove-one.
        released: the event, as `event_text` writes it.
        neighboring: the relation, by name.
        delta: where the guarantee is stated.
        unit: whom it protects, each ``"record"`` or each ``"person"``.
        notes: of the guarantee, as ``privacy_`` has them.
    """

    estimator: str
    n: int
    released: str
    neighboring: str
    delta: float
    unit: str
    notes: tuple[str, ...]
    model_file: ClassVar[str] = "model.pkl"

    @cached_property
    def event(self) -> dp_accounting.DpEvent:
        """Everything that was released."""
        return event_from_json(json.loads(self.released))

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee, computed from the event."""
        found = compute_epsilon(self.event, self.delta, self.neighboring)
        return replace(found, unit=self.unit, notes=self.notes)

    @property
    def basis(self) -> tuple[Assumption, ...]:
        """The guarantee's basis; its notes say what is special about this fit."""
        of_records = ONE_RECORD_A_PERSON if self.unit == "record" else OWNERS_ARE_NAMED
        return (
            BOUNDED,
            NOISE,
            relation_on_trust(self.n, self.neighboring, self.unit),
            of_records,
            LAST_BITS,
            AS_LEFT,
            PACKAGE,
            *(trusted(note) for note in self.notes if ON_TRUST in note or note == ALONE),
            *(Assumption("unproven", UNPROVEN[note]) for note in self.notes if note in UNPROVEN),
            *(Assumption("unproven", CHOSEN) for note in self.notes if OF_CLONES in note),
        )

    def to_json(self) -> str:
        """The record as a JSON document that `from_json` turns back into an equal one."""
        return dump(
            with_digest(
                {
                    "format": FORMAT,
                    "estimator": self.estimator,
                    "n": self.n,
                    "event": json.loads(self.released),
                    "guarantee": self.guarantee.to_json(),
                }
            )
        )

    @classmethod
    def from_json(cls, text: str) -> "FitRecord":
        """Read a record, its guarantee computed again.

        Raises:
            ValueError: no such record, one that was edited, or one that promises something else
                than its event costs.
        """
        data = load(text, what="fit", format=FORMAT, fix="give what dpoptim.certify wrote")
        try:
            stated: dict[str, Any] = data["guarantee"]
            found = cls(
                estimator=data["estimator"],
                n=data["n"],
                released=json.dumps(data["event"], sort_keys=True),
                neighboring=stated["neighboring"],
                delta=stated["delta"],
                unit=stated["unit"],
                notes=tuple(stated["notes"]),
            )
            stored, computed = Guarantee.from_json(stated), found.guarantee
        except (KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError("text is a damaged fit: certify it again.") from None
        refuse_other_promise(stored, computed)
        return found


Promise = Plan | FitRecord


def promise_from_json(text: str) -> Promise:
    """Read a run directory's ``plan.json``: a plan, or the record of a fit.

    Raises:
        ValueError: as `Plan.from_json` and `FitRecord.from_json`.
    """
    try:
        of_fit = json.loads(text)["format"] == FORMAT
    except (ValueError, RecursionError, KeyError, TypeError):
        of_fit = False  # the plan's reader says what is wrong
    return FitRecord.from_json(text) if of_fit else Plan.from_json(text)
