"""Are the files of a run directory those that the certificate, and the evaluations, speak of?"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dp_accounting

from dpoptim.accounting.event_json import event_from_json, event_text
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_runs import Reservation
from dpoptim.documents import sha256_of
from dpoptim.plan.text import same_number
from dpoptim.printable import printable
from dpoptim.runs.evaluation_section import NO_EVALUATION, REPORT, parts_of, text_of
from dpoptim.runs.evaluations import (
    NAME,
    SECTIONS,
    costs_together,
    headline,
    in_words,
    label_ending,
    read_evaluations,
    refuted_evaluations,
    trained_by,
)
from dpoptim.runs.fit_record import FitRecord, Promise
from dpoptim.runs.interrupted import SECRET
from dpoptim.runs.signature import CERTIFICATE, signature_of

SCHEMA, MODEL = "schema.toml", "model.pt"
PICKLED = (
    "{}: what it does when it is opened; it is a pickle, which runs what it holds, so here its "
    "SHA-256 alone is compared"
)
ELSEWHERE = {"plan.json", CERTIFICATE}  # which `verify` has lines of its own for


@dataclass
class Found:
    """Lines about what was looked at: right, not looked into, no part of the run, and wrong.

    Attributes:
        missing: names of files that the certificate names by their digests.
    """

    checked: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    charges: set[str] = field(default_factory=set)  # of evaluations, in ledgers that were named

    def of_evaluations(self, ledger: Ledger) -> bool:
        """Whether the ledger holds the charge of an evaluation."""
        return any(entry.id in self.charges for entry in ledger.entries())


def check_files(
    folder: Path, written: Mapping[str, Any], plan: Promise, ledgers: Sequence[Ledger]
) -> Found:
    """Look at every file of the run directory.

    Args:
        written: the certificate. ledgers: those that were named, verified.

    Raises:
        ValueError: the record of evaluations is damaged or was edited.
    """
    found = Found()
    kept = read_evaluations(folder)
    named = written.get("files") or {}
    model = plan.model_file if isinstance(plan, FitRecord) else MODEL
    check_model(folder / model, written["model"]["sha256"], found)
    if model != MODEL:
        found.open.append(PICKLED.format(model))
    check_named(folder / SCHEMA, named, found, lambda text: text)
    check_named(folder / REPORT, named, found, without_evaluations)
    if REPORT in named and (folder / REPORT).is_file():
        check_section(folder / REPORT, kept, found)
    if kept["evaluations"]:
        check_evaluations(kept, written, plan, found)
    check_charges(kept["evaluations"], written, ledgers, found)
    signed = {signature_of(name).name for name in (CERTIFICATE, NAME)}
    if (folder / signature_of(NAME)).exists() and not kept["evaluations"]:
        found.wrong.append(f"{NAME} was signed, and is not here")
    for path in sorted(folder.iterdir()):
        shown = printable(path.name)
        if path.name in signed:
            found.open.append(f"{shown}: whose signature it is (--public-key FILE)")
        elif path.name.startswith((SECRET, "progress-")):
            found.open.append(f"{shown}: of an unfinished run; it holds data, and is not released")
        elif path.name not in {SCHEMA, REPORT, NAME, model, *ELSEWHERE}:
            found.unknown.append(f"{shown}: no file that the certificate speaks of")
    return found


def check_model(path: Path, stated: str | None, found: Found) -> None:
    """The model against the digest that the certificate names."""
    if stated is None:
        found.open.append("the model: the certificate does not say which one it is about")
    elif not path.is_file():
        found.missing.append(path.name)
    elif hashlib.sha256(path.read_bytes()).hexdigest() != stated:
        found.wrong.append(
            f"{path.name} is not the model of this certificate: its SHA-256 is another one"
        )
    else:
        found.checked.append(f"{path.name} is the model that the certificate is about")


def check_named(
    path: Path, named: Mapping[str, str], found: Found, read: Callable[[str], str]
) -> None:
    """A text file against the digest that the certificate names."""
    if path.name not in named:
        if path.is_file():
            found.open.append(
                f"{path.name}: the certificate names no digest of it; where it says another thing, "
                "certificate.json and model.pt count"
            )
    elif not path.is_file():
        found.missing.append(path.name)
    elif sha256_of(read(text_of(path))) != named[path.name]:
        found.wrong.append(f"{path.name} was edited, or is of another run: its SHA-256 is another")
    else:
        found.checked.append(f"{path.name} is the one that the certificate names")


def without_evaluations(page: str) -> str:
    """The report as the training left it."""
    parts = parts_of(page)
    return page if parts is None else f"{parts[0]}{NO_EVALUATION}{parts[2]}"


def check_section(path: Path, kept: Mapping[str, Any], found: Found) -> None:
    """The report's section of evaluations against the digest that their record names."""
    parts = parts_of(text_of(path))
    shown = "" if parts is None else parts[1]
    stated, before = (kept[name] for name in SECTIONS)
    if shown and sha256_of(shown) == before != stated:
        found.open.append(f"{path.name}: it does not show the last evaluation, which {NAME} lists")
    elif shown and sha256_of(shown) != stated:
        found.wrong.append(f"{path.name} was edited: its evaluations are not those of {NAME}")
    elif stated is not None and not shown:
        found.open.append(f"{path.name}: it does not show the evaluations, which {NAME} lists")


def check_evaluations(
    kept: Mapping[str, Any], written: Mapping[str, Any], plan: Promise, found: Found
) -> None:
    """Each evaluation's guarantee, and their sums, computed again."""
    entries = kept["evaluations"]
    expected = costs_together(entries)
    model = written["model"]["sha256"]
    found.wrong += [f"{NAME}: {line}" for line in refuted_evaluations(entries)]
    found.wrong += [
        f"{NAME}: evaluation {number} counts another training than the plan's"
        for number, entry in enumerate(entries, 1)
        if entry["records"] == "training"
        and entry["model_sha256"] == model
        and not same_event(trained_by(entry), plan.event)
    ]
    stated = kept["together"]
    if len(stated) != len(expected) or not all(map(same_sum, stated, expected)):
        found.wrong.append(f"{NAME}: the sum is not that of the evaluations")
    found.checked += [
        f"{NAME}: evaluation {number} of {entry['data']} ({entry['records']}) cost "
        f"{entry['guarantee']['text']}"
        for number, entry in enumerate(entries, 1)
    ]
    found.checked += [f"{NAME}: {in_words(each)}" for each in expected]
    foreign = [e for e in entries if e["model_sha256"] != model]
    if foreign:
        found.open.append(f"of these evaluations {len(foreign)} are of another model")
    scores = ", ".join(f"{said} {score}" for said, score in map(headline, entries))
    found.open.append(
        f"{NAME}: scores, what their records were, and that there were no others stand there alone "
        f"(dpoptim sign): {scores}"
    )


def same_sum(stated: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two sums say the same, but for rounding."""
    one, other = ({**found["guarantee"]} for found in (stated, expected))
    close = same_number(float(one.pop("epsilon")), float(other.pop("epsilon")))
    return close and {**stated, "guarantee": one} == {**expected, "guarantee": other}


def same_event(one: dp_accounting.DpEvent | None, other: dp_accounting.DpEvent) -> bool:
    """Whether both release the same."""
    return one is not None and event_text(one) == event_text(other)


def charged_for(charge: Reservation, entry: Mapping[str, Any]) -> bool:
    """Whether a charge is of this release, of this model, under this relation and unit."""
    stated = entry["guarantee"]
    return (
        same_event(event_from_json(entry["event"]), charge.event)
        and (charge.neighboring, charge.unit) == (stated["neighboring"], stated["unit"])
        and charge.label.endswith(label_ending(entry["model_sha256"]))
    )


def check_charges(
    entries: Sequence[Mapping[str, Any]],
    written: Mapping[str, Any],
    ledgers: Sequence[Ledger],
    found: Found,
) -> None:
    """Evaluations against the ledgers that were named, both ways."""
    charged = {each.id: each for ledger in ledgers for each in ledger.entries()}
    for number, entry in enumerate(entries, 1):
        if entry["ledger"] is None:
            continue
        charge = charged.get(entry["ledger"]["reservation"])
        if charge is None:
            file = printable(str(entry["ledger"]["file"]))
            found.open.append(f"the charge of evaluation {number}, in {file} (--ledger FILE)")
            continue
        if charge.id in found.charges:
            found.wrong.append(f"{NAME}: evaluation {number} names the charge of another one")
        elif not charged_for(charge, entry):
            found.wrong.append(f"{NAME}: evaluation {number} was charged otherwise than it says")
        else:
            found.checked.append(f"the ledger holds the charge of evaluation {number}")
        found.charges.add(charge.id)
    ending = label_ending(str(written["model"]["sha256"]))
    left_out = [
        each
        for each in charged.values()
        if each.label.endswith(ending) and each.id not in found.charges
    ]
    found.charges |= {each.id for each in left_out}
    if left_out:
        found.open.append(
            f"{len(left_out)} more evaluations of this model: the ledger holds their charges, and "
            f"{NAME} does not list them; ask what they found"
        )
