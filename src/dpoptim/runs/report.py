"""The report: one HTML file of what a run guarantees, what that rests on, and what it cost.

It says what the certificate says, and draws it. `page` is its frame.
"""

import math
from functools import singledispatch
from typing import Any

from dpoptim.accounting.guarantee import neighboring_name, rounded_up
from dpoptim.plan import Plan
from dpoptim.plan.text import of_each
from dpoptim.runs import page as html
from dpoptim.runs import report_figures as figures
from dpoptim.runs.assumptions import OTHER_WEIGHTS
from dpoptim.runs.certificate import PUBLIC, certificate, percent_up, verdict
from dpoptim.runs.drawing import power_of_ten
from dpoptim.runs.evaluation_section import NO_EVALUATION
from dpoptim.runs.fit_record import FitRecord, Promise
from dpoptim.runs.result import RunResult, kind_of_model
from dpoptim.sampling import PoissonSampling

_SIGNS = {
    "proven": "\N{CHECK MARK}",
    "unproven": "!",
    "marked": "!",
    "none": "\N{MULTIPLICATION X}",
}
VOUCHED, BLANK = "vouched for by", "\N{LOW LINE}" * 16
UNCHARGED = "this was charged to no ledger, so others on the same records are not counted"
FOOTER = "This report holds public figures only."


def report(result: RunResult) -> str:
    """The report as HTML.

    **Guarantee.** Made from ``result`` alone, which holds public figures only; no record is
    touched.
    """
    facts = certificate(result)
    kind = kind_of_model(result.model_name, classifies=bool(result.classes))
    title = f"{kind} trained on {result.data_name}"
    sections = [
        _hero(result, facts),
        _key_facts(result, facts),
        _attacker(result, facts),
        _accuracy(result, facts),
        NO_EVALUATION,
        _promise(result, facts),
        _basis(facts),
        _details(result, facts),
        _verify(facts),
    ]
    finished = result.finished.replace("T", " at ", 1)[:19]
    return html.page("Privacy report", title, finished, sections, FOOTER)


def _hero(result: RunResult, facts: dict[str, Any]) -> str:
    judged, guarantee = verdict(result), result.guarantee
    if math.isinf(guarantee.epsilon):
        epsilon = '<span aria-label="epsilon is infinite">ε <small>=</small> ∞</span>'
    else:
        epsilon = html.at_most(rounded_up(guarantee.epsilon))
    terms = [
        f"at δ = {power_of_ten(guarantee.delta)}",
        neighboring_name(guarantee.neighboring),
        *([f"{guarantee.accountant} accounting"] if guarantee.epsilon < math.inf else []),
        *([f"per {guarantee.unit}"] if guarantee.unit != "record" else []),
    ]
    remarks = ([] if guarantee.status == "proven" else [guarantee.status]) + list(guarantee.notes)
    if OTHER_WEIGHTS.text in facts["basis"]["trusted"]:
        remarks.append(f"on trust: {OTHER_WEIGHTS.text}")
    notes = "".join(
        f'<p class="note">{html.escape(note)}</p>'
        for note in remarks
        if note.lower() != judged.title.lower()
    )
    reading = facts["guarantee"]["reading"]
    trust = '<p class="small">given what is <a href="#basis">taken on trust</a></p>' * (
        judged.kind == "proven"
    )
    badge = f"{_SIGNS[judged.kind]} {judged.title}"
    beside = f'<p class="reading">{html.escape(reading)}</p>{_meter(facts)}'
    return html.hero(judged.kind, badge, epsilon, terms, beside, below=trust + notes)


def _meter(facts: dict[str, Any]) -> str:
    """How far the best guess lies between a coin toss and certainty."""
    if facts["attacker"] is None:
        return ""
    share = facts["attacker"]["right_at_most"]
    here = f"best guess {percent_up(share)}"
    return html.meter(2 * share - 1, here, "50 % coin toss", "100 % certainty")


def _key_facts(result: RunResult, facts: dict[str, Any]) -> str:
    scores, unit = facts["scores"] or {}, result.guarantee.unit.title()
    cells = [(f"{unit}s", f"{result.plan.n:,}", "a public number"), *cells_of(result.plan)]
    if result.seconds is not None:
        cells.append(("Training time", html.duration(result.seconds), "of the private run"))
    if scores.get("private"):
        cells.append(
            (
                result.measure[:1].upper() + result.measure[1:]
                if facts["plan"] is None
                else f"Private {result.measure}",
                _score(result, scores["private"][-1]),
                PUBLIC,
            )
        )
    return html.facts(cells)


@singledispatch
def cells_of(promise: Promise) -> list[tuple[str, str, str]]:
    """Key figures of what was promised: name, value and remark each."""
    raise TypeError(type(promise).__name__)


@cells_of.register
def _(plan: Plan) -> list[tuple[str, str, str]]:
    return [
        (
            "Expected batch",
            f"{plan.batch_size:,}",
            of_each(plan.unit.name, plan.sampler.promise()),
        ),
        ("Noisy steps", f"{plan.steps:,}", f"about {plan.epochs:.3g} epochs"),
        ("Noise multiplier", f"{plan.noise_multiplier:.4g}", "noise / clip norm"),
    ]


@cells_of.register
def _(fit: FitRecord) -> list[tuple[str, str, str]]:
    return [("Fitted", fit.estimator, "charged as a whole")]


def _attacker(result: RunResult, facts: dict[str, Any]) -> str:
    if facts["attacker"] is None:
        return ""
    rows = [
        (
            f"{point['false_positive_rate'] * 100:g} % false alarms",
            percent_up(point["true_positive_rate"]),
        )
        for point in facts["attacker"]["found_at_most"]
    ]
    relation, unit = result.plan.neighboring, result.guarantee.unit
    body = (
        html.figure(
            figures.attacker_figure(result.plan), f"Trade-off of the best attacker, {relation}."
        )
        + f"<div><h3>At most this share is recognised</h3>{html.pairs(rows, 'numbers')}"
        '<p class="small">Blind guessing recognises as many as it raises false alarms.</p></div>'
    )
    return html.section(
        "What an attacker can do",
        html.card(body, "beside"),
        f"Every attack trades false alarms against missed {html.escape(unit)}s. Below the curve "
        "lies what no attack reaches, however clever, and whatever else it knows.",
    )


def _accuracy(result: RunResult, facts: dict[str, Any]) -> str:
    scores = facts["scores"]
    if scores is None:
        return ""
    noisy = facts["plan"] is not None
    name, heading = (
        ("Private", f"What it costs in {result.measure}")
        if noisy
        else ("This model", "How accurate it is" if result.classes else "How well it predicts")
    )
    private, comparison = scores["private"], scores["without_privacy"]
    rows = [
        (name, _score(result, series[-1]))
        for name, series in ((name, private), ("Without privacy", comparison))
        if series
    ]
    if private and comparison and noisy:
        lost = comparison[-1] - private[-1]
        price = f"{100 * lost:.1f} points" if result.classes else f"{lost:.3f}"
        rows.append(("Price of privacy", price.replace("-", "\N{MINUS SIGN}")))
    body = (
        html.figure(
            figures.accuracy_figure(name.lower(), private, comparison, measure=result.measure),
            f"Hold-out {result.measure} {scores['measured']}.",
        )
        + f"<div><h3>After the last epoch</h3>{html.pairs(rows, 'numbers')}"
        '<p class="small">Such figures are releases of their own. They are shown because this '
        "data was declared public.</p></div>"
    )
    return html.section(heading, html.card(body, "beside"))


def _promise(result: RunResult, facts: dict[str, Any]) -> str:
    """Epsilon by delta and by steps."""
    proven, plan = facts["verdict"]["for_release"], result.plan
    if plan.guarantee.status != "proven":
        return ""
    caveat = "" if proven else " (not a guarantee)"
    scope = "The run satisfies every point of the curve over delta at once." if proven else ""
    point = f"ε ≤ {rounded_up(plan.guarantee.epsilon)}"
    curve = html.figure(
        figures.privacy_curve_figure(plan, point, caveat),
        f"Epsilon at other deltas, {plan.neighboring}; the plan's own point is marked.",
    )
    return html.section(
        "One run, many readings",
        f'<div class="pair">{html.card(curve)}{_spending(plan, point, caveat)}</div>',
        f"Epsilon bounds how much any one {html.escape(result.guarantee.unit)} can shift what is "
        f"released; delta is the slack in that bound. {scope}",
    )


def _spending(plan: Promise, point: str, caveat: str) -> str:
    """Epsilon by steps, of those that batches are sampled for."""
    if not (isinstance(plan, Plan) and isinstance(plan.sampler, PoissonSampling)):
        return ""
    return html.card(
        html.figure(
            figures.spending_figure(plan, point, caveat),
            f"Epsilon of shorter plans with the same noise, {plan.neighboring}. This run's whole "
            "plan was reserved before its first step, so stopping early saves nothing.",
        )
    )


def _basis(facts: dict[str, Any]) -> str:
    basis = facts["basis"]
    if not any(basis.values()):
        return ""
    unproven = ""
    if basis["unproven"]:
        unproven = html.card(f"<h3>Unproven</h3>{html.bullets(basis['unproven'])}", "open")
    return (
        '<section id="basis"><h2>What the guarantee rests on</h2><p class="lead">'
        f"{html.escape(facts['guarantee']['relation_explained'])}</p>{unproven}"
        '<div class="pair">'
        + html.card(f"<h3>Enforced in code</h3>{html.bullets(basis['enforced'])}", "enforced")
        + html.card(f"<h3>Taken on trust</h3>{html.bullets(_to_sign(facts))}", "trusted")
        + "</div></section>"
    )


def _to_sign(facts: dict[str, Any]) -> list[str]:
    """Each line that is taken on trust, with who vouches for it, or a place for the name."""
    named = facts.get("vouched_by", {})
    return [f"{line} ({VOUCHED}: {named.get(line, BLANK)})" for line in facts["basis"]["trusted"]]


def _details(result: RunResult, facts: dict[str, Any]) -> str:
    settings = [
        (name.replace("_", " "), _number(value)) for name, value in facts["settings"].items()
    ]
    training = [
        ("parameters", f"{result.parameters:,}"),
        *([("classes", f"{result.classes:,}")] if result.classes else []),
        *result.settings.items(),
    ]
    deltas = [
        (f"δ = {power_of_ten(row['delta'])}", f"ε ≤ {rounded_up(float(row['epsilon']))}")
        for row in facts["further_deltas"]
    ]
    why = UNCHARGED if facts["plan"] else "no noise was added, so nothing was charged"
    ledger = list((facts["ledger"] or {"entry": f"none: {why}"}).items())
    tables = [
        ("Privacy settings", html.pairs(settings)),
        ("Training", html.pairs(training)),
        ("Privacy ledger", html.pairs(ledger)),
        ("Versions", html.pairs(result.versions.items())),
    ]
    if deltas:
        tables.insert(2, ("At other deltas", html.pairs(deltas, "numbers")))
    cards = "".join(html.card(f"<h3>{name}</h3>{table}") for name, table in tables)
    return html.section("Details", f'<div class="columns">{cards}</div>')


def _verify(facts: dict[str, Any]) -> str:
    said = html.escape(facts["guarantee"]["text"])
    text = f"<p>As printed by the library: <strong>{said}</strong></p>"
    if facts["verify"]:
        text += (
            "<p>Epsilon follows from public numbers alone. Anybody can compute it again:</p>"
            f"<pre>{html.escape(facts['verify'])}</pre>"
        )
    return html.section("Check it yourself", html.card(text))


def _number(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, dict):  # a policy's settings
        return ", ".join(f"{name}: {_number(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_number, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _score(result: RunResult, score: float) -> str:
    return html.percent(score) if result.classes else html.number(score)
