"""``dpoptim compare`` as a page: score against time, at one guarantee."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from dpoptim.runs import page as html
from dpoptim.runs.compare import WITHOUT_PRIVACY, Compared, not_told_apart
from dpoptim.runs.drawing import (
    ACCENT,
    LINE,
    MUTED,
    WARM,
    figure_style,
    inline_svg,
    new_axes,
    titles,
)

FOOTER = (
    "Scores of many runs are shown, which only public data allows. Times are of this machine, and "
    "include everything but loading. The error of the hold-out is what "
    "another one of as many records would move a score by: one standard error."
)
HEADINGS = ("method", "score", "spread over seeds", "error of the hold-out", "time", "guarantee")


def compare_page(found: Sequence[Compared], title: str) -> str:
    """The page. Args: found: of `compare_methods`, best first; of data that is public.

    **Guarantee.** None; see `compare_methods`.
    """
    private = [each for each in found if each.method != WITHOUT_PRIVACY]
    sections = [hero(found, private), picture(found), table(found)]
    seeds = len(found[0].scores)
    remark = f"{seeds} seed{'' if seeds == 1 else 's'} each, on public data"
    return html.page("Methods compared", title, remark, sections, FOOTER)


def shown(each: Compared) -> str:
    return f"{each.mean:.1%}" if each.measure == "accuracy" else f"{each.mean:.3f}"


def hero(found: Sequence[Compared], private: Sequence[Compared]) -> str:
    best = private[0]
    quickest = min(private, key=lambda each: each.seconds)
    rows = [
        (f"Best: {best.method}", f"{shown(best)} in {html.duration(best.seconds)}"),
        (f"Quickest: {quickest.method}", f"{shown(quickest)} in {html.duration(quickest.seconds)}"),
        *(
            (WITHOUT_PRIVACY.capitalize(), f"{shown(each)} in {html.duration(each.seconds)}")
            for each in found
            if each.method == WITHOUT_PRIVACY
        ),
    ]
    close = not_told_apart(found)[1:]
    told = f" The hold-out does not tell it from {', '.join(close)}." if close else ""
    return html.card(
        f'<div><p class="reading"><strong>{html.escape(best.method)}'
        f"</strong> scores best of {len(private)} at one guarantee.{html.escape(told)}</p>"
        f'<p class="terms">{html.escape(best.guarantee)}</p></div>'
        f"<div>{html.pairs(rows, 'numbers')}</div>",
        "hero proven",
    )


def picture(found: Sequence[Compared]) -> str:
    drawn = html.figure(
        time_figure(found),
        f"Score ({found[0].measure}) on the public hold-out against the time of training, all at "
        "the same guarantee.",
    )
    return html.section(
        "Score against time",
        html.card(drawn, "wide"),
        "Higher is better, further left is quicker; bars are one standard deviation over the "
        "seeds.",
    )


def table(found: Sequence[Compared]) -> str:
    rows = [
        (
            each.method,
            shown(each),
            f"{100 * each.spread:.1f} points"
            if each.measure == "accuracy"
            else f"{each.spread:.3f}",
            "" if each.hold_out_error is None else f"{100 * each.hold_out_error:.1f} points",
            html.duration(each.seconds),
            each.guarantee,
        )
        for each in found
    ]
    best = next(place for place, each in enumerate(found) if each.method != WITHOUT_PRIVACY)
    return html.section("All methods", html.card(html.grid(HEADINGS, rows, best)))


def time_figure(found: Sequence[Compared]) -> str:
    """A point for each method; a line for training without privacy."""
    private = [each for each in found if each.method != WITHOUT_PRIVACY]
    means = [each.mean for each in found]
    room = max(max(means) - min(means), 0.02)
    low, high = min(means) - 0.25 * room, max(means) + 0.2 * room
    with figure_style("time"):
        axes = new_axes()
        axes.set_xscale("log")
        axes.set_ylim(low, high)
        times = [each.seconds for each in private]
        axes.set_xlim(min(times) / 2, max(times) * 2)
        for each in found:
            if each.method == WITHOUT_PRIVACY:
                axes.axhline(each.mean, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for place, each in enumerate(private):
            colour = WARM if place == 0 else ACCENT
            axes.errorbar(
                each.seconds, each.mean, yerr=each.spread, fmt="o", color=colour, capsize=3
            )
        name_points(axes, found, best=private[0], gap=0.075 * (high - low), right=2 * max(times))
        axes.set_position((0.115, 0.16, 0.5, 0.71))
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0), numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: html.duration(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        if found[0].measure == "accuracy":
            places = 0 if high - low > 0.04 else 1
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=places))
        titles(axes, f"{found[0].measure} on data declared public", "time of training")
        return inline_svg(axes, "time")


def name_points(
    axes: Axes, found: Sequence[Compared], *, best: Compared, gap: float, right: float
) -> None:
    """Write each method beside the figure, joined to its point by a line.

    Args:
        gap: between two names, at least, in the figure's units.
        right: where the axis of times ends.
    """
    labels = sorted(found, key=lambda each: each.mean)
    heights = apart([each.mean for each in labels], gap)
    for each, height in zip(labels, heights, strict=True):
        private = each.method != WITHOUT_PRIVACY
        if private:
            ends = [each.seconds, right]
            axes.plot(ends, [each.mean, height], color=LINE, linewidth=0.8, zorder=0)
        axes.text(
            1.02,
            height,
            f"{each.method}  {shown(each)}",
            color=WARM if each is best else ACCENT if private else MUTED,
            va="center",
            transform=axes.get_yaxis_transform(),
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, rising, each at least ``gap`` above the one before, as low as can be."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    shift = (placed[-1] - heights[-1]) / 2
    return [height - shift for height in placed]
