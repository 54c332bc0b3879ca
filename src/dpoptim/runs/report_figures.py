"""The report's pictures: what a plan promises and costs, as inline SVG.

Labels sit on the curves, so there are no legends; colours are from Okabe and Ito's set, which
colour-blind readers can tell apart. Each picture says its relation itself, should somebody cut it
out.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dpoptim.accounting.accountant import compute_epsilon, privacy_curve, tradeoff_curve
from dpoptim.plan import Plan

# Each colour that is drawn stands for one of the page's, so that pictures follow it into dark
# mode.
INK, MUTED, LINE, ACCENT, WARM, PAPER = (
    "#1a2431",
    "#5b6675",
    "#d5dae1",
    "#0060a8",
    "#b04a00",
    "#fefefe",
)
_PAGE_COLOURS = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    ACCENT: "--accent",
    WARM: "--warm",
    PAPER: "--paper",
}
_STYLE: dict[str, Any] = {
    # text stays text: small, sharp, in the page's typeface, and searchable
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
}


def power_of_ten(value: float) -> str:
    """1e-05 as people write it; three digits rounded up where it is no power of ten."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value) + 1e-12)
    mantissa = math.ceil(value / 10.0**exponent * 100 - 1e-6) / 100
    if mantissa == 10:
        exponent, mantissa = exponent + 1, 1.0
    power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == 1 else f"{mantissa:g} × {power}"


def privacy_curve_figure(plan: Plan, point: str, caveat: str = "") -> str:
    """Epsilon against delta for the whole run, the plan's own point marked and called
    ``point``.
    """
    guarantee = plan.guarantee
    least, most = min(1e-10, guarantee.delta), max(1e-3, guarantee.delta)
    deltas = np.geomspace(least, most, 40)
    epsilons = privacy_curve(plan.event, plan.neighboring, deltas)
    finite = np.isfinite(epsilons)
    with _style("curve"):
        axes = _axes()
        axes.plot(deltas[finite], epsilons[finite], color=ACCENT)
        axes.set_xscale("log")
        ticks = 10.0 ** np.arange(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1)
        ticks = ticks[:: max(1, math.ceil(len(ticks) / 5))]
        axes.set_xticks(ticks, [power_of_ten(float(tick)) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, float(epsilons[finite].max()) * 1.12)
        _mark(
            axes,
            guarantee.delta,
            guarantee.epsilon,
            point,
            "right" if guarantee.delta > most / 30 else "left",
        )
        _titles(axes, f"epsilon, {plan.neighboring}{caveat}", "delta")
        return _svg(axes, "curve")


def spending_figure(plan: Plan, point: str, caveat: str = "") -> str:
    """Epsilon, at the plan's delta, of plans that are like this one but stop earlier; its end
    called ``point``.
    """
    # Epsilon grows about like the square root of the steps; squares spread the points evenly along
    # the curve.
    steps = sorted({max(1, round(plan.steps * (part / 8) ** 2)) for part in range(1, 9)})
    epsilons = [_epsilon_after(plan, count) for count in steps[:-1]] + [plan.guarantee.epsilon]
    with _style("spending"):
        axes = _axes()
        axes.plot(steps, epsilons, color=ACCENT, marker="o", markersize=3.5)
        axes.set_xlim(0, plan.steps * 1.04)
        axes.set_ylim(0, max(epsilons) * 1.16)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        _mark(axes, plan.steps, plan.guarantee.epsilon, point, "right")
        _titles(
            axes,
            f"epsilon at δ = {power_of_ten(plan.guarantee.delta)}, {plan.neighboring}{caveat}",
            "",
        )
        axes.set_xlabel("steps, if the run were planned to stop there")
        return _svg(axes, "spending")


def attacker_figure(plan: Plan) -> str:
    """The errors that no attacker can avoid: false negatives against false positives, by the whole
    curve.
    """
    alarms = np.concatenate([np.linspace(0, 0.1, 21), np.linspace(0.1, 1, 46)[1:]])
    misses = tradeoff_curve(plan.event, plan.neighboring, alarms)
    with _style("attacker"):
        axes = _axes()
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
        _titles(axes, f"{plan.guarantee.unit}s missed, {plan.neighboring}", "false alarms")
        return _svg(axes, "attacker")


def accuracy_figure(
    name: str, scores: Sequence[float] | None, comparison: Sequence[float] | None
) -> str:
    """Hold-out accuracy after each epoch; the caller knows that the hold-out is public."""
    both = (("without privacy", comparison, MUTED), (name, scores, ACCENT))
    lines = [(label, series, colour) for label, series, colour in both if series]
    everything = [score for _, series, _ in lines for score in series]
    room = max(max(everything) - min(everything), 0.02)
    low, high = max(0.0, min(everything) - 0.15 * room), min(1.0, max(everything) + 0.15 * room)
    with _style("accuracy"):
        axes = _axes()
        longest = max(len(series) for _, series, _ in lines)
        for _, series, colour in lines:
            axes.plot(range(1, len(series) + 1), series, color=colour)
            axes.plot(len(series), series[-1], "o", color=colour, markersize=6)
        axes.set_ylim(low, high)
        axes.set_xlim(*((1 - 0.02 * longest, longest * 1.02) if longest > 1 else (0.5, 1.5)))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low > 0.04 else 1))
        finals = [series[-1] for _, series, _ in lines]
        for (label, series, colour), height in zip(
            lines, _spread(finals, 0.2 * (high - low)), strict=True
        ):
            text = f"{label}\n{series[-1] * 100:.1f} %"
            where = axes.get_yaxis_transform()
            axes.text(
                1.02, height, text, color=colour, va="center", transform=where, linespacing=1.25
            )
        axes.set_position((0.115, 0.16, 0.555, 0.71))
        _titles(axes, "accuracy on data declared public", "epoch")
        return _svg(axes, "accuracy")


def _epsilon_after(plan: Plan, steps: int) -> float:
    event = replace(plan, steps=steps).event
    return compute_epsilon(event, plan.guarantee.delta, plan.neighboring).epsilon


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Where two labels go so as not to touch: at their heights, or as far apart as need be around
    the middle.
    """
    if len(heights) < 2 or abs(heights[0] - heights[1]) >= gap:
        return list(heights)
    middle, sign = sum(heights) / 2, 1 if heights[0] >= heights[1] else -1
    return [middle + sign * gap / 2, middle - sign * gap / 2]


def _mark(axes: Axes, x: float, y: float, text: str, side: str) -> None:
    """A point with its label above it, which begins or ends there: ``side`` is the side that is
    aligned.
    """
    axes.plot(
        x, y, "o", color=WARM, markersize=8, markeredgecolor=PAPER, markeredgewidth=1.5, zorder=3
    )
    offset = (5 if side == "left" else 0, 8)
    axes.annotate(
        text, (x, y), offset, textcoords="offset points", ha=side, color=WARM, weight="bold"
    )


def _titles(axes: Axes, vertical: str, horizontal: str) -> None:
    """Axis names that read without turning one's head."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.text(0, 0.94, vertical, color=INK)
    axes.set_xlabel(horizontal, loc="right", fontsize=9.5, labelpad=3)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


@contextmanager
def _style(name: str) -> Iterator[None]:
    """The report's style, whatever the user has set; matplotlib's own settings come back
    afterwards.
    """
    with (
        style.context(_STYLE, after_reset=True),
        mpl.rc_context({"svg.hashsalt": f"dpoptim {name}"}),  # the same run makes the same bytes
    ):
        yield


def _axes() -> Axes:
    """An empty picture; never through pyplot, whose state belongs to the user."""
    figure = Figure(figsize=(4.4, 3.1))
    figure.patch.set_visible(False)
    axes = figure.add_axes((0.115, 0.16, 0.855, 0.71))
    axes.patch.set_visible(False)
    return axes


def _svg(axes: Axes, name: str) -> str:
    """The picture as an element for the inside of an HTML page: no prologue, no metadata, no
    outside names.
    """
    figure, buffer = axes.get_figure(root=True), io.StringIO()
    assert figure is not None
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    # Several pictures share one page, where an id may occur only once.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _PAGE_COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    return text
