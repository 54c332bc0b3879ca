"""The report's pictures: what a plan promises and costs, as inline SVG.

Each picture says its relation itself, should somebody cut it out. `drawing` says how they look.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dpoptim.accounting.accountant import compute_epsilon, privacy_curve, tradeoff_curve
from dpoptim.plan import Plan
from dpoptim.runs.drawing import (
    ACCENT,
    MUTED,
    figure_style,
    inline_svg,
    mark,
    new_axes,
    power_of_ten,
    spread,
    titles,
)
from dpoptim.runs.fit_record import Promise


def privacy_curve_figure(plan: Promise, point: str, caveat: str = "") -> str:
    """Epsilon against delta for the whole run, the plan's own point marked as ``point``."""
    guarantee = plan.guarantee
    least, most = min(1e-10, guarantee.delta), max(1e-3, guarantee.delta)
    deltas = np.geomspace(least, most, 40)
    epsilons = privacy_curve(plan.event, plan.neighboring, deltas)
    finite = np.isfinite(epsilons)
    with figure_style("curve"):
        axes = new_axes()
        axes.plot(deltas[finite], epsilons[finite], color=ACCENT)
        axes.set_xscale("log")
        ticks = 10.0 ** np.arange(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1)
        ticks = ticks[:: max(1, math.ceil(len(ticks) / 5))]
        axes.set_xticks(ticks, [power_of_ten(float(tick)) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, float(epsilons[finite].max()) * 1.12)
        mark(
            axes,
            guarantee.delta,
            guarantee.epsilon,
            point,
            "right" if guarantee.delta > most / 30 else "left",
        )
        titles(axes, f"epsilon, {plan.neighboring}{caveat}", "delta")
        return inline_svg(axes, "curve")


def spending_figure(plan: Plan, point: str, caveat: str = "") -> str:
    """Epsilon, at the plan's delta, of plans like this that stop earlier; its end: ``point``."""
    # Epsilon grows about like the square root of the steps; squares spread the points evenly along
    # the curve.
    steps = sorted({max(1, round(plan.steps * (part / 8) ** 2)) for part in range(1, 9)})
    epsilons = [_epsilon_after(plan, count) for count in steps[:-1]] + [plan.guarantee.epsilon]
    with figure_style("spending"):
        axes = new_axes()
        axes.plot(steps, epsilons, color=ACCENT, marker="o", markersize=3.5)
        axes.set_xlim(0, plan.steps * 1.04)
        axes.set_ylim(0, max(epsilons) * 1.16)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        mark(axes, plan.steps, plan.guarantee.epsilon, point, "right")
        titles(
            axes,
            f"epsilon at δ = {power_of_ten(plan.guarantee.delta)}, {plan.neighboring}{caveat}",
            "",
        )
        axes.set_xlabel("steps, if the run were planned to stop there")
        return inline_svg(axes, "spending")


def attacker_figure(plan: Promise) -> str:
    """The errors that no attacker can avoid: false negatives against false positives."""
    alarms = np.concatenate([np.linspace(0, 0.1, 21), np.linspace(0.1, 1, 46)[1:]])
    misses = tradeoff_curve(plan.event, plan.neighboring, alarms)
    with figure_style("attacker"):
        axes = new_axes()
        axes.plot([0, 1], [1, 0], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.fill_between(alarms, misses, color=ACCENT, alpha=0.10, linewidth=0)
        axes.plot(alarms, misses, color=ACCENT)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        ticks = (0, 0.25, 0.5, 0.75, 1)
        axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        # 0 % is said once, in the corner
        axes.set_yticks(ticks, ["", *(f"{tick:.0%}" for tick in ticks[1:])])
        low = float(np.interp(0.2, alarms, misses))
        if low > 0.35:
            axes.text(
                0.05,
                low / 3,
                "out of reach\nfor every attacker",
                color=ACCENT,
                va="center",
                linespacing=1.3,
            )
        axes.text(0.55, 0.53, "blind guessing", color=MUTED)
        titles(axes, f"{plan.guarantee.unit}s missed, {plan.neighboring}", "false alarms")
        return inline_svg(axes, "attacker")


def accuracy_figure(
    name: str,
    scores: Sequence[float] | None,
    comparison: Sequence[float] | None,
    *,
    measure: str = "accuracy",
) -> str:
    """Hold-out scores after each epoch; the caller knows that the hold-out is public."""
    both = (("without privacy", comparison, MUTED), (name, scores, ACCENT))
    lines = [(label, series, colour) for label, series, colour in both if series]
    everything = [score for _, series, _ in lines for score in series]
    room = max(max(everything) - min(everything), 0.02)
    low, high = min(everything) - 0.15 * room, min(1.0, max(everything) + 0.15 * room)
    if measure == "accuracy":  # R2 may be below 0
        low = max(0.0, low)
    with figure_style("accuracy"):
        axes = new_axes()
        longest = max(len(series) for _, series, _ in lines)
        for _, series, colour in lines:
            axes.plot(range(1, len(series) + 1), series, color=colour)
            axes.plot(len(series), series[-1], "o", color=colour, markersize=6)
        axes.set_ylim(low, high)
        axes.set_xlim(*((1 - 0.02 * longest, longest * 1.02) if longest > 1 else (0.5, 1.5)))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        if measure == "accuracy":
            places = 0 if high - low > 0.04 else 1
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=places))
        finals = [series[-1] for _, series, _ in lines]
        for (label, series, colour), height in zip(
            lines, spread(finals, 0.2 * (high - low)), strict=True
        ):
            last = series[-1]
            text = f"{label}\n" + (
                f"{last * 100:.1f} %" if measure == "accuracy" else f"{last:.3f}"
            )
            where = axes.get_yaxis_transform()
            axes.text(
                1.02, height, text, color=colour, va="center", transform=where, linespacing=1.25
            )
        axes.set_position((0.115, 0.16, 0.555, 0.71))
        titles(axes, f"{measure} on data declared public", "epoch")
        return inline_svg(axes, "accuracy")


def _epsilon_after(plan: Plan, steps: int) -> float:
    event = replace(plan, steps=steps).event
    return compute_epsilon(event, plan.guarantee.delta, plan.neighboring).epsilon
