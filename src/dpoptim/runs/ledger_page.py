"""``dpoptim ledger`` as a page: what was promised about a data set, run by run."""

import math
from itertools import accumulate
from typing import Any

import dp_accounting
import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import neighboring_name, rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import delta_of, in_percent
from dpoptim.accounting.ledger_runs import Reservation
from dpoptim.runs import page as html
from dpoptim.runs.drawing import (
    ACCENT,
    WARM,
    figure_style,
    inline_svg,
    mark,
    new_axes,
    power_of_ten,
    titles,
)

MOST_ROWS = 200
FOOTER = (
    "Every line was written before the noise it stands for was drawn. Public figures only: which "
    "runs there were, and what they cost."
)
HEADINGS = ("#", "time (UTC)", "run", "alone", "of the budget", "state")


def ledger_page(ledger: Ledger) -> str:
    """The page.

    **Guarantee.** Made from the ledger's entries, which hold public figures only.
    """
    entries = ledger.entries()
    sections = [top(ledger, entries), key_facts(ledger, entries)]
    if entries:
        sections += [history(ledger, entries), runs(ledger, entries)]
    sections.append(check(ledger))
    remark = f"{len(entries)} run{'' if len(entries) == 1 else 's'}"
    return html.page("Privacy ledger", f"Ledger of {ledger.dataset}", remark, sections, FOOTER)


def top(ledger: Ledger, entries: list[Reservation]) -> str:
    """The guarantee, and a meter of the budget."""
    budget = ledger.budget
    if budget is None:
        kind, badge, number = "unproven", "No budget", spent_so_far(ledger, entries)
        reading = (
            "Runs are written down, and none is refused. The figure holds only if no run's "
            "settings depended on what an earlier one released."
        )
        filled = ""
    else:
        left = ledger.remaining()
        used = min(1.0, sum(ledger.shares())) if entries else 0.0
        full = bool(entries) and left.left == 0
        kind, badge = ("marked", "Used up") if full else ("proven", "Budget kept")
        number = rounded_up(budget.epsilon)
        reading = (
            "Whatever was released so far, and whatever later runs this ledger admits, stays "
            "within this budget, also if each run is planned on what earlier ones released."
        )
        room = (
            "nothing more is admitted"
            if full
            else f"room for about one Gaussian release of epsilon {left.next_epsilon:.3g}"
        )
        filled = html.meter(used, f"{used:.0%} reserved", "0 %", room)
    terms = (f"at δ = {power_of_ten(delta_of(ledger.budget))}", ledger.neighboring)
    reading = f'<p class="reading">{html.escape(reading)}</p>{filled}'
    return html.hero(kind, badge, html.at_most(number), terms, reading)


def shown(epsilon: float) -> str:
    return rounded_up(epsilon) if math.isfinite(epsilon) else "∞"


def spent_so_far(ledger: Ledger, entries: list[Reservation]) -> str:
    return shown(ledger.spent(delta_of(ledger.budget)).epsilon) if entries else "0"


def key_facts(ledger: Ledger, entries: list[Reservation]) -> str:
    unfinished = sum(entry.state == "open" for entry in entries)
    last = entries[-1].time[:10] if entries else "—"
    return html.facts(
        [
            ("Runs", f"{len(entries):,}", "each charged in full before it began"),
            ("Not completed", f"{unfinished:,}", "they stay charged"),
            ("Last run", last, "UTC"),
            ("Relation", neighboring_name(ledger.neighboring), "of every guarantee here"),
        ]
    )


def history(ledger: Ledger, entries: list[Reservation]) -> str:
    budgeted = ledger.budget is not None
    caption = (
        "Share of the budget that is reserved after each run; nothing above 100 % is admitted."
        if budgeted
        else "Epsilon of all runs so far, composed."
    )
    drawing = shares_figure(ledger.shares()) if budgeted else epsilons_figure(ledger, entries)
    left = html.pairs(what_is_left(ledger, entries), "numbers")
    body = html.card(f"{html.figure(drawing, caption)}<div>{left}</div>", "beside")
    return html.section("Budget over time", body)


def what_is_left(ledger: Ledger, entries: list[Reservation]) -> list[tuple[str, str]]:
    dearest = max(
        compute_epsilon(e.event, delta_of(ledger.budget), e.neighboring).epsilon for e in entries
    )
    rows = [
        ("Dearest run, alone", f"ε ≤ {rounded_up(dearest)}" if math.isfinite(dearest) else "∞"),
        ("First run", entries[0].time[:10]),
    ]
    if ledger.budget is None:
        return rows
    left = ledger.remaining()
    return [
        ("Budget left", f"{left.left / left.limit:.1%}"),
        ("Room for one Gaussian release of", f"ε {left.next_epsilon:.3g}"),
        *rows,
    ]


def runs(ledger: Ledger, entries: list[Reservation]) -> str:
    shares = ledger.shares() if ledger.budget is not None else [math.nan] * len(entries)
    numbered = list(enumerate(zip(entries, shares, strict=True), 1))[-MOST_ROWS:]
    rows = [
        (
            str(number),
            entry.time[:16].replace("T", " "),
            entry.label,
            f"ε ≤ {alone(entry, delta_of(ledger.budget))}",
            "—" if math.isnan(share) else in_percent(share),
            entry.state + (f", resumed {entry.resumed} times" if entry.resumed else ""),
        )
        for number, (entry, share) in reversed(numbered)
    ]
    older = len(entries) - len(rows)
    lead = f" The oldest {older:,} are left out." if older else ""
    return html.section(
        "Run by run",
        html.card(html.grid(HEADINGS, rows)),
        f'"Alone" is what a run would guarantee at δ = {power_of_ten(delta_of(ledger.budget))} if '
        f"it were the only one; such figures do not simply add up.{lead}",
    )


def alone(entry: Reservation, delta: float) -> str:
    return shown(compute_epsilon(entry.event, delta, entry.neighboring).epsilon)


def check(ledger: Ledger) -> str:
    body = (
        "<p>The digest covers every entry. Kept elsewhere, it shows later whether the ledger was "
        "written anew or replaced by an older copy:</p>"
        f"<pre>dpoptim ledger FILE --verify --digest {html.escape(ledger.digest)}</pre>"
    )
    return html.section("Check it yourself", html.card(body))


def shares_figure(shares: list[float]) -> str:
    """Reserved shares, added up run by run, under the bound."""
    total = [min(1.0, each) for each in accumulate(shares, initial=0.0)]
    with figure_style("shares"):
        axes = new_axes()
        stairs(axes, total)
        axes.axhline(1, color=WARM, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0, 1.02, "the budget", color=WARM, va="bottom")
        axes.set_ylim(0, max(1.15, total[-1] * 1.1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        at = "right" if len(shares) > 1 else "left"
        mark(axes, len(shares), total[-1], f"{total[-1]:.0%}", at)
        titles(axes, "budget reserved", "runs")
        return inline_svg(axes, "shares")


def epsilons_figure(ledger: Ledger, entries: list[Reservation]) -> str:
    """Epsilon of the runs so far, after each of at most 20 of them."""
    delta, counts = delta_of(ledger.budget), sorted({*np.linspace(1, len(entries), 20).astype(int)})
    found = [
        compute_epsilon(
            dp_accounting.ComposedDpEvent([entry.event for entry in entries[:count]]),
            delta,
            ledger.neighboring,
        ).epsilon
        for count in counts
    ]
    with figure_style("epsilons"):
        axes = new_axes()
        axes.plot([0, *counts], [0.0, *found], color=ACCENT, marker="o", markersize=3.5)
        axes.set_ylim(0, max(found) * 1.16)
        mark(axes, counts[-1], found[-1], f"ε ≤ {rounded_up(found[-1])}", "right")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        titles(axes, f"epsilon at δ = {power_of_ten(delta)}", "runs")
        return inline_svg(axes, "epsilons")


def stairs(axes: Any, total: list[float]) -> None:
    """A filled staircase over the runs."""
    numbers = [*range(len(total)), len(total) - 0.6]
    total = [*total, total[-1]]
    axes.fill_between(numbers, total, step="post", color=ACCENT, alpha=0.10, linewidth=0)
    axes.step(numbers, total, where="post", color=ACCENT)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(0, numbers[-1])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
