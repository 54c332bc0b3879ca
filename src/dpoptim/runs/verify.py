"""Is a run's certificate what its plan gives? All that the plan determines, computed again.

What only the run knew (names, scores, times, what attaching found out) cannot be computed: the
digest in the certificate shows damage to it, and a signature any change.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import SEEDED
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.assumptions import Assumption
from dpoptim.documents import DIGEST, load
from dpoptim.installed import SOURCES, digests
from dpoptim.plan import Plan
from dpoptim.plan.text import same_number
from dpoptim.printable import printable
from dpoptim.runs.certificate import FORMAT, certificate
from dpoptim.runs.fit_record import Promise, promise_from_json
from dpoptim.runs.result import LedgerEntry, RunResult
from dpoptim.runs.unfinished import PLAN, is_unfinished, state_of_unfinished
from dpoptim.runs.verify_files import check_files
from dpoptim.runs.vouching import vouched_in, who_vouches
from dpoptim.training.assumptions import LOOP, PACKAGE
from dpoptim.training.batches.slots import had_slots, less_lost_delta

T = TypeVar("T")


@dataclass(frozen=True)
class Verified:
    """A run whose certificate is what its plan gives.

    Attributes:
        checked: one line for each thing that was checked.
        open: one line for each thing that was not, and what would check it.
        unknown: one line for each file that is no part of a run.
    """

    plan: Promise
    certificate: dict[str, Any]
    checked: tuple[str, ...]
    open: tuple[str, ...]
    unknown: tuple[str, ...]


def verify_run(folder: Path, *, ledgers: Sequence[Path] = ()) -> Verified:
    """Compare the certificate in a run directory with plan, files and ledgers.

    Args:
        ledgers: each holds the charge of the training, or of an evaluation.

    Raises:
        ValueError: naming every entry that is not as it should be, or the file that cannot be read;
            or the run has not ended.
        FileNotFoundError: a file is missing. LedgerError: the ledger cannot be read.
    """
    refuse_uncertified(folder, ledgers)
    plan = read_document(folder / PLAN, promise_from_json)
    written = read_document(folder / "certificate.json", read_certificate)
    try:
        expected = certificate(result_by_certificate(plan, written))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{_shown(folder)}: the certificate lacks entries or has wrong ones "
            f"({type(error).__name__})."
        ) from None
    wrong = [
        *differing_entries(written, expected),
        *missing_basis(plan, written),
        *unnamed_package(written),
    ]
    if wrong:
        raise ValueError(
            f"{_shown(folder)}: the certificate is not what its plan gives; do not trust it. "
            f"{'; '.join(wrong)}."
        )
    checked = [
        "the plan's guarantee follows from its settings",
        "the certificate's guarantee, reading, attacker, settings and basis are the plan's",
        "plan and certificate have their own digests",
    ]
    unchecked = [
        "certificate.json: names, scores, times, which charge is its own and what attaching found "
        "stand there alone (dpoptim sign)",
        *who_vouches(written),
    ]
    same, line = compared_package(written)
    (checked if same else unchecked).append(line)
    opened = {path: open_verified(path) for path in ledgers}
    files = check_files(folder, written, plan, list(opened.values()))
    if files.wrong:
        raise ValueError(f"{_shown(folder)}: {'; '.join(files.wrong)}. Do not trust it.")
    if files.missing:
        raise ValueError(
            f"{_shown(folder)} lacks what its certificate names by SHA-256: "
            f"{', '.join(files.missing)}. Fix: ask for the whole run directory."
        )
    charges = [
        check_ledger(path, charge_of(path, ledger, written), plan)
        for path, ledger in opened.items()
        if of_training(ledger, written) or not files.of_evaluations(ledger)
    ]
    if charges:
        checked += charges
    elif written["ledger"] is not None:
        unchecked.append(
            f"the charge {printable(str(written['ledger']['reservation']))} (--ledger FILE)"
        )
    return Verified(
        plan,
        written,
        (*checked, *files.checked),
        (*unchecked, *files.open),
        tuple(files.unknown),
    )


def refuse_uncertified(folder: Path, ledgers: Sequence[Path]) -> None:
    """Refuse a directory of something else, or of a run that has not ended, saying what it is."""
    if folder.is_file():
        raise ValueError(
            f"{_shown(folder)} is a file, and what is verified is a run directory: a model alone "
            "says nothing that could be checked. Fix: ask for the folder that dpoptim train, or "
            "dpoptim.certify, wrote."
        )
    if (folder / "tune.json").is_file() and not (folder / PLAN).exists():
        raise ValueError(
            f"{_shown(folder)} holds what dpoptim tune found, which has no certificate. Fix: "
            "dpoptim ledger FILE --verify, for the ledger that the search was charged to; or train "
            "by its settings (dpoptim train), which is certified, and costs its own epsilon."
        )
    if is_unfinished(folder):
        path = folder / PLAN
        plan_of_it = read_document(path, Plan.from_json) if path.is_file() else None
        raise ValueError(
            state_of_unfinished(folder, plan_of_it, [open_verified(each) for each in ledgers])
        )


def result_by_certificate(plan: Promise, written: dict[str, Any]) -> RunResult:
    """A run of this plan with what the certificate says of everything else."""
    basis = tuple(
        Assumption(kind, text) for kind, texts in written["basis"].items() for text in texts
    )
    said = [*written["guarantee"]["notes"], *written["basis"]["unproven"]]
    guarantee = plan.guarantee
    if isinstance(plan, Plan) and had_slots(written["basis"]):
        guarantee = less_lost_delta(plan, guarantee)
    # wherever it is said, it holds
    if any("seeded" in text for text in said) and SEEDED not in guarantee.notes:
        guarantee = replace(guarantee, notes=(*guarantee.notes, SEEDED))
    scores = written["scores"] or {"private": None, "without_privacy": None}
    charged = written["ledger"]
    settings = dict(written["training"])
    seconds = settings.pop("seconds")
    return RunResult(
        data_name=written["data"]["name"],
        model_name=written["model"]["name"],
        classes=written["data"]["classes"],
        parameters=written["model"]["parameters"],
        plan=plan,
        guarantee=guarantee,
        basis=basis,
        settings=settings,
        seconds=seconds,
        ledger=None if charged is None else _entry(charged),
        private_scores=scores["private"] and tuple(scores["private"]),
        comparison_scores=scores["without_privacy"] and tuple(scores["without_privacy"]),
        versions=written["versions"],
        finished=written["finished"],
        model_sha256=written["model"]["sha256"],
        files=files_of(written),
        vouched_by=vouched_in(written),
    )


def files_of(written: dict[str, Any]) -> dict[str, str] | None:
    """Digests of other files by name; None of an earlier version. ValueError for anything else."""
    files = written.get("files")
    if files is not None and not all(isinstance(each, str) for each in files.values()):
        raise ValueError("a digest")
    return files


def differing_entries(written: Any, expected: Any, place: str = "") -> Iterator[str]:
    """One line for each entry that differs."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for name in dict.fromkeys([*expected, *written]):
            if name == DIGEST and not place:
                continue  # of the document itself; it was checked when the text was read
            inner = f"{place}.{name}" if place else str(name)
            if name not in written:
                yield f"{printable(inner)} is missing"
            elif name not in expected:
                yield f"{printable(inner)} does not belong there"
            else:
                yield from differing_entries(written[name], expected[name], inner)
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for number, (one, other) in enumerate(zip(written, expected, strict=True)):
            yield from differing_entries(one, other, f"{place}[{number}]")
    elif not _same(written, expected):
        yield (
            f"{printable(place)} says {printable(repr(written))}, the plan gives "
            f"{printable(repr(expected))}"
        )


def missing_basis(plan: Promise, written: dict[str, Any]) -> Iterator[str]:
    """Assumptions of the plan's guarantee that the certificate does not list."""
    if written["verdict"]["kind"] == "none":  # then nothing is listed
        return
    for item in plan.basis:
        if item.text not in written["basis"][item.kind]:
            yield f"basis.{item.kind} lacks {item.text!r}"


def unnamed_package(written: dict[str, Any]) -> Iterator[str]:
    """The package named without a line that says whose loop it was, or a line without the name."""
    if written["verdict"]["kind"] == "none":
        return
    named = SOURCES in written["versions"]
    if named and not {PACKAGE.text, LOOP}.intersection(written["basis"]["trusted"]):
        yield f"basis.trusted lacks {PACKAGE.text!r}"
    if not named and PACKAGE.text in written["basis"]["trusted"]:
        yield f"versions lacks {SOURCES!r}, which basis.trusted speaks of"


def compared_package(written: dict[str, Any]) -> tuple[bool, str]:
    """Whether the package that trained is the one that verifies, and a line that says so."""
    versions = written["versions"]
    trained = f"dpoptim {printable(str(versions.get('dpoptim')))}"
    if SOURCES not in versions:
        return False, (
            f"which package trained: the certificate says {trained} and, being of an earlier "
            "version, no SHA-256; so it lists on trust what loop, loss and model do"
        )
    if versions[SOURCES] != digests()[SOURCES]:
        return False, (
            f"which package trained: {trained} with SHA-256 {printable(str(versions[SOURCES]))}, "
            "and this is another one (verify with the same dpoptim)"
        )
    return True, f"the certificate names this package, {trained} by SHA-256 of its sources"


def open_verified(path: Path) -> Ledger:
    """The ledger, which is whole. FileNotFoundError if there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no ledger at {_shown(path)}.")
    ledger = Ledger(path)
    ledger.verify()
    return ledger


def of_training(ledger: Ledger, written: dict[str, Any]) -> bool:
    """Whether the ledger holds the charge that the certificate names."""
    named = (written["ledger"] or {}).get("reservation")
    return any(entry.id == named for entry in ledger.entries())


def charge_of(path: Path, ledger: Ledger, written: dict[str, Any]) -> Reservation:
    """The run's charge. ValueError if the ledger is another, or holds none."""
    if written["ledger"] is None:
        raise ValueError(
            f"{_shown(path)}: the certificate names no charge, so no ledger can hold it."
        )
    if ledger.dataset != (stated := written["ledger"]["dataset"]):
        raise ValueError(
            f"{_shown(path)} is the ledger of {printable(ledger.dataset)!r}, the run was charged "
            f"for {printable(str(stated))!r}."
        )
    identity = written["ledger"]["reservation"]
    found = next((entry for entry in ledger.entries() if entry.id == identity), None)
    if found is None:
        raise ValueError(
            f"{_shown(path)} holds no charge {printable(str(identity))}, which the certificate "
            "names."
        )
    return found


def check_ledger(path: Path, found: Reservation, plan: Promise) -> str:
    """The charge is as much as the plan costs, and a line that says so."""
    charged = compute_epsilon(found.event, plan.delta, found.neighboring)
    if found.neighboring != plan.neighboring or charged.epsilon < plan.guarantee.epsilon * (
        1 - 1e-6
    ):
        raise ValueError(
            f"{_shown(path)}: the run was charged {charged}, its plan costs {plan.guarantee}."
        )
    if found.unit != plan.guarantee.unit:
        raise ValueError(
            f"{_shown(path)}: the run was charged for each {found.unit}, and its plan says "
            f"{plan.guarantee.unit}."
        )
    return f"the ledger holds its charge, {found.state}"


def read_document(path: Path, read: Callable[[str], T]) -> T:
    """Read a document. ValueError, naming the file, for one that is damaged or was edited."""
    text = read_text(path)
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{_shown(path)}: {error}") from None


def read_certificate(text: str) -> dict[str, Any]:
    return load(text, what="certificate", format=FORMAT, fix="give what `dpoptim train` wrote")


def read_text(path: Path) -> str:
    """A text file. ValueError if it is none."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{_shown(path)} is missing; give the folder that `dpoptim train --out` wrote."
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"{_shown(path)} is no text in UTF-8: it is damaged, or something else."
        ) from None


def _entry(charged: dict[str, str]) -> LedgerEntry:
    path = None if charged["file"] == "in memory" else charged["file"]
    return LedgerEntry(path, charged["dataset"], charged["reservation"], charged["remaining"])


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return same_number(a, b) or math.isclose(a, b, abs_tol=1e-15)
    return type(a) is type(b) and a == b


def _shown(path: Path) -> str:
    return printable(str(path))
