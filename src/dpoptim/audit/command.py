"""``dpoptim audit``: `named_audits`, with table, picture and file; or a saved run's."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpoptim.audit.attack_families import attack, audits
from dpoptim.audit.finding import CONFIDENCE, WEAK, Finding, finding
from dpoptim.files import write_atomically
from dpoptim.plan import Plan
from dpoptim.runs.verify import verify_run

UNPROMISED = "no noise, nothing promised"


def chosen(method: str) -> list[str]:
    """The audits that a name stands for: itself, ``all``, or those that begin with it.

    Raises:
        ValueError: none does.
    """
    names = [name for name in audits() if method in ("all", name) or name.startswith(f"{method},")]
    if not names:
        raise ValueError(f"method must be 'all' or one of {'; '.join(audits())}. Got {method!r}.")
    return names


def audit_run(directory: Path, *, trials: int, seed: int) -> list[Finding]:
    """Check a run's certificate against its plan, and attack the plan's sampling, clipping, noise.

    What is attacked is a replay on canary records: the run's data is not needed.

    Raises:
        ValueError: the plan promises more than its settings give, or the certificate something
            else than the plan.
    """
    verified = verify_run(directory)  # refuses an edited promise
    plan, written = verified.plan, verified.certificate["guarantee"]
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{directory.name} holds a fit of {plan.estimator}, and --run attacks plans of steps. "
            "Fix: dpoptim audit, which attacks solvers, searches and steps by their methods."
        )
    doubts = [] if written["status"] == "proven" else [written["status"]]
    name = "; ".join([f"run {directory.name}", *doubts, *written["notes"]])
    if plan.noise_multiplier == 0:
        nothing = finding(plan.guarantee.epsilon, 0.0, 0.0, 0)
        return [replace(nothing, method=name, verdict=UNPROMISED, expected=UNPROMISED)]
    return [replace(attack(plan, trials, seed), method=name)]


def verdict_text(found: Finding, trials: int) -> str:
    """The verdict for a person, with the ``--trials`` that would do if ``trials`` were too few."""
    said = found.verdict
    if not found.as_expected:
        said = f"{said} (should be {found.expected})"
    elif said == WEAK:
        enough = math.ceil(trials * found.trials_needed / max(found.trials, 1))
        said = f"{WEAK}: about --trials {enough} would do"
    return "; ".join([said, *found.notes])


def save(findings: Sequence[Finding], out: Path, settings: dict[str, Any]) -> None:
    """Write ``audit.json`` and ``audit.png`` into the folder ``out``, made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "confidence": CONFIDENCE,
        **settings,
        "findings": [one.to_json() for one in findings],
    }
    write_atomically(out / "audit.json", json.dumps(document, indent=2))
    draw(out / "audit.png", findings)


def draw(path: Path, findings: Sequence[Finding]) -> None:
    """Bars: what is claimed, and of it what was certified; red where the claim is refuted."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.6 + 0.4 * len(findings)), layout="constrained")
    places = range(len(findings))
    shares = [one.lower_bound / one.claimed if one.claimed > 0 else 0.0 for one in findings]
    axis.barh(places, [1.0] * len(findings), color="#e5e7eb", label="claimed")
    colours = ["#dc2626" if one.verdict == "refuted" else "#2563eb" for one in findings]
    axis.barh(
        places,
        [min(share, 1.6) for share in shares],
        height=0.5,
        color=colours,
        label="certified by the attack",
    )
    for place, one in zip(places, findings, strict=True):
        text = f"{one.lower_bound:.2f} of {one.claimed:.2f}" + (
            " refuted" if one.verdict == "refuted" else ""
        )
        axis.text(0.02, place, text, va="center", fontsize=8, color="white")
    axis.set_yticks(places, [one.method for one in findings])
    axis.invert_yaxis()
    axis.set(xlabel="epsilon, as a share of the claim", xlim=(0, 1.6))
    figure.savefig(path, dpi=150)
    plt.close(figure)
