"""Certificates of fits: of an estimator, a pipeline or a search, with its charge."""

import datetime
import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import Guarantee, neighboring_name
from dpoptim.accounting.ledger import Ledger
from dpoptim.assumptions import Assumption
from dpoptim.errors import PrivacyError
from dpoptim.estimators.repeats import CountsFits, Paid
from dpoptim.plan.text import same_number
from dpoptim.printable import printable
from dpoptim.runs.fit_record import FitRecord
from dpoptim.runs.result import LedgerEntry, RunResult, same_ledger
from dpoptim.runs.train import package_versions
from dpoptim.training.assumptions import basis_of_ledger, in_order


def fit_handed_over(
    fitted: CountsFits, data: str, settings: Mapping[str, str]
) -> tuple[str, bytes, RunResult]:
    """The pickled estimator, by name and content, and the public figures of its fit.

    Raises:
        PrivacyError: it is not fitted, or has learnt nothing privately; no proof or no single
            event covers what it has learnt; or its ledger does not hold the charge.
    """
    record = record_of(fitted)
    entry = entry_of_fit(fitted, record)
    content = pickled(fitted)
    basis = in_order((*record.basis, *basis_of_charge(entry)))
    result = RunResult(
        data_name=printable(data),
        model_name=record.estimator,
        classes=len(getattr(fitted, "classes_", ())),
        parameters=numbers_in(fitted),
        plan=record,
        guarantee=record.guarantee,
        basis=basis,
        settings={
            **{printable(name): printable(value) for name, value in settings.items()},
            **dict(own_settings(fitted)),
        },
        seconds=None,
        ledger=entry,
        private_scores=None,
        comparison_scores=None,
        versions={**package_versions(), "scikit-learn": version("scikit-learn")},
        finished=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        model_sha256=hashlib.sha256(content).hexdigest(),
    )
    return record.model_file, content, result


def basis_of_charge(entry: LedgerEntry | None) -> tuple[Assumption, ...]:
    """Assumptions about other runs on the same records; without a ledger a note has them."""
    if entry is None:
        return ()
    if entry.path is None:
        return basis_of_ledger(False)
    return (*basis_of_ledger(True), same_ledger(entry.dataset, "the ledger's name of them"))


def record_of(fitted: CountsFits) -> FitRecord:
    """The record of a fit that one event pays for; a PrivacyError of any other."""
    name = type(fitted).__name__
    stated: Guarantee | None = getattr(fitted, "privacy_", None)
    if stated is None:
        raise PrivacyError(
            f"this {name} has learnt nothing privately: it is not fitted, or its settings read no "
            "record. Fix: certify what was fitted, after its fit."
        )
    if stated.status != "proven":
        raise PrivacyError(
            f"this {name} has no proven guarantee ({stated.status}), and a certificate would look "
            "like one. Fix: a method and settings with a proof."
        )
    refuse_other_parts(fitted)
    paid: Paid | None = getattr(fitted, "_paid", None)
    if paid is None or not paid.event:
        raise PrivacyError(
            f"no single event is all that this {name} has cost: it learnt from several chunks of a "
            "stream, in another process, or by an earlier version. Fix: fit it on the whole table, "
            "here."
        )
    record = FitRecord(
        estimator=name,
        n=paid.records,
        released=paid.event,
        neighboring=neighboring_name(stated.neighboring),
        delta=stated.delta,
        unit=stated.unit,
        notes=stated.notes,
    )
    if not same_number(record.guarantee.epsilon, stated.epsilon):
        raise PrivacyError(
            f"privacy_ of this {name} says {stated}, and what it has released costs "
            f"{record.guarantee}. Fix: leave privacy_ as its fit set it."
        )
    return record


def refuse_other_parts(fitted: CountsFits) -> None:
    """Refuse what holds estimators that another fit has fitted, whose cost is another one.

    Raises:
        PrivacyError: a step or winner was fitted again or exchanged, or is another pipeline's,
            too; or a search was given an estimator that was fitted before.
    """
    name, own = type(fitted).__name__, getattr(fitted, "_fit_id", None)
    if any(getattr(part, "_fit_id", None) != own for part in fitted._fitted_parts()):
        raise PrivacyError(
            f"parts of this {name} were fitted by another fit than its own, whose cost is another "
            "one. Fix: certify it as its fit left it, with steps of its own (sklearn.base.clone); "
            "what is fitted again, certify by itself."
        )
    if getattr(getattr(fitted, "estimator", None), "privacy_", None) is not None:
        raise PrivacyError(
            f"the estimator that this {name} was given is fitted, and would be in the file beside "
            "the winner. Fix: give it sklearn.base.clone(estimator)."
        )


def entry_of_fit(fitted: CountsFits, record: FitRecord) -> LedgerEntry | None:
    """The ledger's entry of a fit; None if it was charged to none. A PrivacyError if it is lost."""
    run, ledger = getattr(fitted, "ledger_run_", None), fitted.ledger
    if run is None:
        return None
    if ledger is None:
        raise PrivacyError(
            f"this fit was charged as run {run}, and the estimator names no ledger now. Fix: "
            "set_params(ledger=dpoptim.Ledger(FILE)) with that ledger; of a pipeline's step, or "
            "of a search's best_estimator_, certify the pipeline or the search."
        )
    found = next((entry for entry in ledger.entries() if entry.id == run), None)
    if found is None:
        raise PrivacyError(f"the estimator's ledger holds no run {run}, as which it was charged.")
    charged = compute_epsilon(found.event, record.delta, found.neighboring)
    enough = charged.epsilon >= record.guarantee.epsilon * (1 - 1e-6)
    if neighboring_name(found.neighboring) != record.neighboring or not enough:
        raise PrivacyError(f"run {run} was charged {charged}, and this fit costs more.")
    if found.unit != record.unit:
        raise PrivacyError(
            f"run {run} was charged for each {found.unit}, and privacy_ says {record.unit}. Fix: "
            "leave privacy_ as its fit set it."
        )
    path = None if ledger.path is None else str(ledger.path)
    return LedgerEntry(path, ledger.dataset, run, str(ledger.remaining()))


class WithoutLedger(pickle.Pickler):
    """Pickles estimators with no ledger in them: where it lies is its owner's business."""

    def reducer_override(self, obj: object) -> Any:
        return (type(None), ()) if isinstance(obj, Ledger) else NotImplemented


def pickled(fitted: CountsFits) -> bytes:
    """The estimator as a pickle. ValueError if it cannot be one."""
    buffer = io.BytesIO()
    try:
        WithoutLedger(buffer).dump(fitted)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this {type(fitted).__name__} cannot be pickled ({type(error).__name__}). Fix: no "
            "functions in its settings but those that a module names."
        ) from None
    return buffer.getvalue()


def numbers_in(fitted: Any) -> int:
    """How many numbers its model has learnt; of a pipeline's last step, or a search's winner."""
    fitted = getattr(fitted, "best_estimator_", fitted)
    fitted = getattr(fitted, "_final_estimator", fitted)
    if hasattr(fitted, "network_"):
        return sum(each.numel() for each in fitted.network_.parameters())
    return int(np.size(getattr(fitted, "coef_", ())) + np.size(getattr(fitted, "intercept_", ())))


# what the guarantee says as it was at the fit, and settings may say otherwise since; and secrets
STATED = {"epsilon", "delta", "neighboring", "n", "noise_seed"}


def own_settings(fitted: CountsFits) -> Iterator[tuple[str, str]]:
    """Settings of the estimator, and of those within, that are numbers or words."""
    for name, value in fitted.get_params(deep=True).items():
        stated = name.rpartition("__")[2] in STATED
        if isinstance(value, int | float | str) and not stated:
            yield printable(name), printable(str(value))
