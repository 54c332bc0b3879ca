"""``evaluations.json``: every score on private records that a model's run directory knows of.

Each release costs, and the best of several is better than it is, so none replaces another.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget_words import spent
from dpoptim.accounting.event_json import event_from_json, event_to_json
from dpoptim.accounting.guarantee import SEEDED, Guarantee
from dpoptim.documents import load
from dpoptim.evaluation import ClassifierScores, Interval, RegressorScores
from dpoptim.evaluation.scored_records import Records
from dpoptim.plan.text import same_number
from dpoptim.printable import printable
from dpoptim.runs.certificate import ledger_entry
from dpoptim.runs.result import LedgerEntry

# of the report's section of evaluations, and of the one that it replaces
SECTIONS = ("report_section_sha256", "section_before_sha256")
NAME: str = "evaluations.json"
FORMAT = "dpoptim.evaluations/1"
SELECTED = "the best of several scores reads too high: it was chosen for its noise and luck, too"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a saved model; public once it is released.

    Attributes:
        data: name of the file. records: what they were to the model.
        event: what the evaluation released, as it was charged.
        training: what the training released, where its records are these; None of a hold-out, and
            where there is no plan.
        ledger: where; None: nowhere.
        made: local date and time, ISO 8601.
    """

    scores: ClassifierScores | RegressorScores
    data: str
    records: Records
    event: dp_accounting.DpEvent
    ledger: LedgerEntry | None
    model_sha256: str
    made: str
    training: dp_accounting.DpEvent | None = None

    def to_json(self) -> dict[str, Any]:
        """The evaluation as strict JSON can hold it."""
        guarantee = self.scores.guarantee
        return {
            "made": self.made,
            "data": self.data,
            "records": self.records,
            "model_sha256": self.model_sha256,
            "guarantee": {**guarantee.to_json(), "text": str(guarantee)},
            "scores": scores_to_json(self.scores),
            "event": event_to_json(self.event),
            "training": None if self.training is None else event_to_json(self.training),
            "ledger": ledger_entry(self.ledger),
        }


def label_ending(model: str) -> str:
    """How the ledger's label of an evaluation ends, by the SHA-256 of the model's file."""
    return f"model {model[:16]}"


def scores_to_json(scores: ClassifierScores | RegressorScores) -> dict[str, Any]:
    """The figures alone."""
    found = {name: value for name, value in asdict(scores).items() if name != "guarantee"}
    if isinstance(scores, ClassifierScores):
        found["confusion"] = scores.confusion.tolist()
        found["histogram"] = scores.histogram.tolist()
        found["calibration"] = list(found["calibration"])
    return found


def read_evaluations(folder: Path) -> dict[str, Any]:
    """Read the document; of a folder without one an empty one.

    Raises:
        ValueError: naming the file, for one that is damaged or was edited. OSError: it cannot be
            read.
    """
    path = folder / NAME
    if not os.path.lexists(path):  # a link that leads nowhere is no folder without evaluations
        return {"evaluations": [], "together": [], **dict.fromkeys(SECTIONS)}
    fix = "give what `dpoptim evaluate` wrote"
    try:
        text = path.read_text(encoding="utf-8")
        document = load(text, what="record of evaluations", format=FORMAT, fix=fix)
    except ValueError as error:
        kind = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{printable(str(path))}: {kind}") from None
    try:
        require_form(document)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{printable(str(path))} lacks entries or has wrong ones ({type(error).__name__}). Do "
            "not trust it; take the one that was first written."
        ) from None
    return document


def require_form(document: Mapping[str, Any]) -> None:
    """Raise unless all that is read of the document later is there, and of its kind."""
    for entry in document["evaluations"]:
        event_from_json(entry["event"])
        trained_by(entry)
        claimed_by(entry)
        measure, score = headline(entry)
        charge = {"file": "", "reservation": ""} if entry["ledger"] is None else entry["ledger"]
        texts = [
            *(entry[name] for name in ("made", "data", "records", "model_sha256")),
            *(charge[name] for name in ("file", "reservation")),
            *(measure, entry["guarantee"]["text"]),
        ]
        if not all(isinstance(text, str) for text in texts) or score.low > score.high:
            raise ValueError("a text, or an interval")
    for found in document["together"]:
        float(found["guarantee"]["epsilon"])
    if not all(isinstance(document[name], str | None) for name in SECTIONS):
        raise TypeError("a digest")


def headline(entry: Mapping[str, Any]) -> tuple[str, Interval]:
    """The figure of an evaluation that stands for it, and its name."""
    name, said = ("accuracy", "accuracy") if "accuracy" in entry["scores"] else ("r2", "R2")
    return said, Interval(**entry["scores"][name])


def claimed_by(entry: Mapping[str, Any]) -> Guarantee:
    """The guarantee that an evaluation states."""
    return Guarantee.from_json({k: v for k, v in entry["guarantee"].items() if k != "text"})


def trained_by(entry: Mapping[str, Any]) -> dp_accounting.DpEvent | None:
    """Event of the evaluated model's training, as the evaluation states it."""
    return None if entry["training"] is None else event_from_json(entry["training"])


def costs_together(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cost of evaluations together, for one who is in all of them, at their least delta.

    One sum for each relation and unit, which do not add up; with the training of each model that
    was scored on its own records.

    Args:
        entries: as `Evaluation.to_json` makes them.
    """
    kinds = dict.fromkeys((e["guarantee"]["neighboring"], e["guarantee"]["unit"]) for e in entries)
    return [sum_of(evaluations_of_kind(entries, kind), kind) for kind in kinds]


def evaluations_of_kind(
    entries: Iterable[Mapping[str, Any]], kind: tuple[str, str]
) -> list[Mapping[str, Any]]:
    return [e for e in entries if (e["guarantee"]["neighboring"], e["guarantee"]["unit"]) == kind]


def sum_of(entries: Sequence[Mapping[str, Any]], kind: tuple[str, str]) -> dict[str, Any]:
    """The sum of evaluations of one relation and unit, as strict JSON can hold it."""
    events = [event_from_json(entry["event"]) for entry in entries]
    # whose ledger, and so relation and unit, is theirs; a folder may have held several models
    models = {e["model_sha256"]: trained_by(e) for e in entries if e["records"] == "training"}
    training = "counted" if models else "apart"
    if None in models.values():  # a search has no plan to add
        training = "on top"
    events += [event for event in models.values() if event is not None]
    delta = min(float(entry["guarantee"]["delta"]) for entry in entries)
    found = replace(spent(None, events, delta, kind[0]), unit=kind[1])
    if any(SEEDED in entry["guarantee"]["notes"] for entry in entries):
        found = replace(found, notes=(*found.notes, SEEDED))
    return {
        "evaluations": len(entries),
        "training": training,
        "without_ledger": sum(entry["ledger"] is None for entry in entries),
        "guarantee": {**found.to_json(), "text": str(found)},
    }


def in_words(found: Mapping[str, Any]) -> str:
    """A sum of `costs_together` in one line."""
    count, open_ = found["evaluations"], found["without_ledger"]
    what = "1 evaluation" if count == 1 else f"{count} evaluations together"
    what += {"apart": "", "counted": ", with the training", "on top": " on top of the training"}[
        found["training"]
    ]
    aside = f"; {open_} of them in no ledger" if open_ else ""
    return f"{what}: {found['guarantee']['text']}{aside}"


def refuted_evaluations(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each evaluation whose guarantee is not what its event gives."""
    wrong = []
    for number, entry in enumerate(entries, 1):
        claimed = claimed_by(entry)
        event = event_from_json(entry["event"])
        found = compute_epsilon(event, claimed.delta, claimed.neighboring)
        if str(claimed) != entry["guarantee"]["text"] or (claimed.status, claimed.accountant) != (
            found.status,
            found.accountant,
        ):
            wrong.append(f"evaluation {number}: its guarantee is not what its event gives")
        elif not same_number(claimed.epsilon, found.epsilon):
            wrong.append(
                f"evaluation {number} says epsilon {claimed.epsilon}, its event gives "
                f"{found.epsilon}"
            )
    return wrong
