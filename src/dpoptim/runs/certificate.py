"""The certificate: what a finished run may claim, as strict JSON; the report shows the same.

It holds public figures only. Scores are in it only where the run's data was declared public.
"""

import json
import math
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, singledispatch
from pathlib import Path
from typing import Any, Literal

import dp_accounting

from dpoptim.accounting.accountant import privacy_curve, tradeoff_curve
from dpoptim.accounting.attacker import right_at_most
from dpoptim.accounting.guarantee import Guarantee, neighboring_name
from dpoptim.documents import dump, with_digest
from dpoptim.files import write_atomically
from dpoptim.plan import Plan
from dpoptim.plan.text import of_each
from dpoptim.runs.fit_record import FitRecord, Promise
from dpoptim.runs.plans import plan_by_numbers
from dpoptim.runs.result import LedgerEntry, RunResult

FORMAT = "dpoptim.certificate/3"
FURTHER_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
PUBLIC = "on data declared public"

RELATIONS = {
    "add-or-remove-one": "Two data sets are neighbours if one of them has one {unit} more than "
    "the other. "
    "The guarantee hides whether any one {unit} was used at all.",
    "zero-out": "Two data sets are neighbours if one {unit} counts in one of them and "
    "contributes nothing in "
    "the other. The guarantee hides whether any one {unit} contributed; the number of {unit}s is "
    "public.",
    "replace-one": "Two data sets are neighbours if one {unit} has another value. The guarantee "
    "hides which "
    "value any one {unit} has; the number of {unit}s is public.",
}
QUESTIONS = {
    "add-or-remove-one": "whether one particular {unit} was used",
    "zero-out": "whether one particular {unit} contributed",
    "replace-one": "which of two values one particular {unit} has",
}


@dataclass(frozen=True)
class Verdict:
    """Whether the run's numbers are a guarantee, and if not, why.

    Attributes:
        kind: "proven": the numbers hold if what is taken on trust does. "unproven": no proof
            covers the run. "marked": a note says that it is not for release (seeded noise).
            "none": nothing is guaranteed.
        title: a few words for a badge. text: one sentence.
    """

    kind: Literal["proven", "unproven", "marked", "none"]
    title: str
    text: str


def verdict(result: RunResult) -> Verdict:
    """The least favourable thing that is known about the run decides."""
    guarantee = result.guarantee
    if math.isinf(guarantee.epsilon):
        return Verdict(
            "none",
            "No privacy",
            "Nothing is guaranteed: whoever sees this model may be able to tell what it was "
            "trained on.",
        )
    if marks := [note for note in guarantee.notes if "not for release" in note]:
        return Verdict(
            "marked",
            marks[0][:1].upper() + marks[0][1:],
            "This model must not be released: its noise can be repeated and taken off again. The "
            "numbers are those of the same run with secret noise.",
        )
    if guarantee.status != "proven":
        return Verdict(
            "unproven",
            guarantee.status[:1].upper() + guarantee.status[1:],
            "No proof covers this run: the numbers are not a guarantee.",
        )
    if any(item.kind == "unproven" for item in result.basis):
        return Verdict(
            "unproven",
            "Unproven",
            "Something that the guarantee rests on is unproven, so the numbers are not a guarantee "
            "yet.",
        )
    return Verdict(
        "proven", "Proven", "The guarantee is proven, given what is listed as taken on trust."
    )


def guarantee_in_words(result: RunResult) -> str:
    """The guarantee in one sentence that needs no mathematics."""
    judged, guarantee = verdict(result), result.guarantee
    if judged.kind != "proven":
        return judged.text
    question = QUESTIONS[neighboring_name(guarantee.neighboring)].format(unit=guarantee.unit)
    share = percent_up(best_guess(result.plan, guarantee))
    return (
        f"Anyone who studies this model and guesses {question} is right at most {share} of the "
        f"time (a coin toss: 50\N{NO-BREAK SPACE}%), even if they know everything about all the "
        "others."
    )


@lru_cache(maxsize=64)
def best_guess(plan: Promise, guarantee: Guarantee) -> float:
    """A bound on how often the best attacker tells two neighbours apart, on even prior odds.

    See `right_at_most`; without an epsilon there is only the guarantee itself.
    """
    e, delta = guarantee.epsilon, guarantee.delta
    if 0 < e < math.inf:
        return right_at_most(plan.event, plan.neighboring, [(e, delta)])
    return min(1.0, (1 + delta * math.exp(-e)) / (1 + math.exp(-e)))


def certificate(result: RunResult) -> dict[str, Any]:
    """Everything that the run may claim, and on what that rests; strict JSON can hold it.

    **Guarantee.** Made from ``result`` alone, which holds public figures only; no record is
    touched.
    """
    judged, guarantee, plan = verdict(result), result.guarantee, result.plan
    relation = neighboring_name(guarantee.neighboring)
    private = not isinstance(plan.event, dp_accounting.NonPrivateDpEvent)
    document = {
        "format": FORMAT,
        "verdict": {**asdict(judged), "for_release": judged.kind == "proven"},
        "data": {"name": result.data_name, "classes": result.classes},
        "model": {
            "name": result.model_name,
            "parameters": result.parameters,
            **({"file": plan.model_file} if isinstance(plan, FitRecord) else {}),
            "sha256": result.model_sha256,
        },
        "guarantee": {
            **guarantee.to_json(),
            "text": str(guarantee),
            "reading": guarantee_in_words(result),
            "relation_explained": RELATIONS[relation].format(unit=guarantee.unit),
        },
        "attacker": attacker(plan, guarantee) if judged.kind == "proven" else None,
        "settings": settings_of(plan),
        "further_deltas": further_deltas(plan) if private else [],
        "basis": {
            # Without a guarantee there is nothing to rest on anything: a list would look like one.
            kind: [
                item.text for item in result.basis if item.kind == kind and judged.kind != "none"
            ]
            for kind in ("enforced", "trusted", "unproven")
        },
        **({"vouched_by": result.vouched_by} if result.vouched_by else {}),
        "scores": public_scores(result),
        "ledger": ledger_entry(result.ledger),
        "training": {**result.settings, "seconds": result.seconds},
        "plan": json.loads(plan.to_json()) if private else None,
        "verify": account_command(plan) if private else None,
        "versions": result.versions,
        # earlier versions named none
        **({} if result.files is None else {"files": result.files}),
        "finished": result.finished,
    }
    return with_digest(document)


@singledispatch
def settings_of(promise: Promise) -> dict[str, Any]:
    """Settings that the guarantee depends on, by name; strict JSON can hold them."""
    raise TypeError(type(promise).__name__)


@settings_of.register
def _(plan: Plan) -> dict[str, Any]:
    return {
        "method": type(plan.method).__name__,
        **{name: _jsonable(value) for name, value in asdict(plan.method).items()},  # type: ignore[call-overload]
        "n": plan.n,
        "expected_batch_size": plan.batch_size,
        "sampling": of_each(plan.unit.name, plan.sampler.promise()),
        "steps": plan.steps,
        "expected_epochs": plan.epochs,
        "noise_multiplier": plan.noise_multiplier,
    }


@settings_of.register
def _(fit: FitRecord) -> dict[str, Any]:
    return {"estimator": fit.estimator, "n": fit.n, "event": str(fit.event)}


def write_certificate(path: Path, result: RunResult) -> None:
    """Write the certificate as JSON, whole or not at all; OSError names the path and the fix."""
    write_atomically(path, dump(certificate(result)) + "\n")


def attacker(plan: Promise, guarantee: Guarantee) -> dict[str, Any]:
    """The best attacker's reach, by the whole privacy curve."""
    return {
        "right_at_most": best_guess(plan, guarantee),
        "prior_odds": "even",
        "found_at_most": [
            {"false_positive_rate": rate, "true_positive_rate": 1 - missed}
            for rate, missed in zip(FALSE_POSITIVE_RATES, attacker_misses(plan), strict=True)
        ],
    }


@lru_cache(maxsize=64)
def attacker_misses(plan: Promise) -> tuple[float, ...]:
    """The best attacker's misses at each of the rates of false alarms."""
    return tuple(tradeoff_curve(plan.event, plan.neighboring, FALSE_POSITIVE_RATES).tolist())


def further_deltas(plan: Promise) -> list[dict[str, float]]:
    """Epsilon of the whole run at other deltas and the plan's own; None without a proof."""
    if plan.guarantee.status != "proven":
        return []
    exact = {plan.guarantee.delta: plan.guarantee.epsilon}
    return [
        {"delta": delta, "epsilon": _jsonable(exact.get(delta, epsilon))}
        for delta, epsilon in privacy_curve_points(plan)
    ]


@lru_cache(maxsize=64)
def privacy_curve_points(plan: Promise) -> tuple[tuple[float, float], ...]:
    """Pairs (delta, epsilon) of the whole run, the largest delta first."""
    deltas = sorted({*FURTHER_DELTAS, plan.guarantee.delta}, reverse=True)
    return tuple(
        zip(deltas, privacy_curve(plan.event, plan.neighboring, deltas).tolist(), strict=True)
    )


def public_scores(result: RunResult) -> dict[str, Any] | None:
    """Hold-out scores and their measure, said to be on public data; None where there are none."""
    if not (result.private_scores or result.comparison_scores):
        return None
    return {
        "measure": result.measure,
        "measured": f"after each epoch, {PUBLIC}",
        "private": list(result.private_scores or ()) or None,
        "without_privacy": list(result.comparison_scores or ()) or None,
    }


def ledger_entry(entry: LedgerEntry | None) -> dict[str, str] | None:
    """The ledger's entry of the run. Only the file's name: its folder is the owner's business."""
    if entry is None:
        return None
    file = "in memory" if entry.path is None else Path(entry.path).name
    return {
        "file": file,
        "dataset": entry.dataset,
        "reservation": entry.reservation,
        "remaining": entry.remaining,
    }


def account_command(plan: Promise) -> str | None:
    """The command that computes epsilon again from public numbers.

    None without a proof, and where no command makes the plan's event.
    """
    if plan.guarantee.status != "proven":
        return None
    if isinstance(plan.event, dp_accounting.GaussianDpEvent):  # the whole run is one Gaussian
        return command_of(plan, plan.n, 1, plan.event.noise_multiplier)
    return None if isinstance(plan, FitRecord) else command_of_steps(plan)


def command_of_steps(plan: Plan) -> str | None:
    """The command for a run of steps, if one makes the plan's event."""
    size, steps, noise = plan.batch_size, plan.steps, plan.noise_multiplier
    settings = settings_in_words(plan)
    for method, setting in (("dp-sgd", []), (plan.method.name, settings)):
        with suppress(ValueError, TypeError):  # a method that the command does not know
            made = plan_by_numbers(
                method,
                n=plan.n,
                batch_size=size,
                epochs=None,
                steps=steps,
                neighboring=plan.neighboring,
                setting=setting,
                noise_multiplier=noise,
                delta=plan.guarantee.delta,
            )
            if made.event == plan.event:
                words = [] if method == "dp-sgd" else ["--method", method]
                words += [word for each in setting for word in ("--set", each)]
                return " ".join([command_of(plan, size, steps, noise), *map(shlex.quote, words)])
    return None


def command_of(plan: Promise, size: int, steps: int, noise: float) -> str:
    """The command for steps of DP-SGD, with the plan's other numbers."""
    return (
        f"dpoptim account --n {plan.n} --batch-size {size} --steps {steps} --noise-multiplier "
        f"{noise!r} --delta {plan.guarantee.delta!r} --neighboring {plan.neighboring}"
    )


def settings_in_words(plan: Plan) -> list[str]:
    """The method's settings that are not its defaults, each as --set takes it.

    The clip norm is left out: noise is stated over it.
    """
    found = ((field, getattr(plan.method, field.name)) for field in fields(plan.method))  # type: ignore[arg-type]
    return [
        f"{field.name}={value if isinstance(value, str) else json.dumps(_jsonable(value))}"
        for field, value in found
        if field.name != "clip_norm" and value != field.default
    ]


def percent_up(share: float) -> str:
    """A bound as a percentage, never rounded to below itself."""
    return f"{math.ceil(share * 1000) / 10:.1f}\N{NO-BREAK SPACE}%"


def _jsonable(value: Any) -> Any:
    """Strict JSON has no infinity, and no tuples: what is written is what is read."""
    if isinstance(value, tuple | list):
        return [_jsonable(each) for each in value]
    if isinstance(value, dict):
        return {name: _jsonable(each) for name, each in value.items()}
    return "inf" if isinstance(value, float) and math.isinf(value) else value
