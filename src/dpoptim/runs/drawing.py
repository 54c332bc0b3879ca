"""How pictures on the pages look: inline SVG in the page's own colours.

Labels sit on the curves, so there are no legends; colours are from Okabe and Ito's set, which
colour-blind readers can tell apart.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Two labels' places: their heights, or far enough apart around the middle not to touch."""
    if len(heights) < 2 or abs(heights[0] - heights[1]) >= gap:
        return list(heights)
    middle, sign = sum(heights) / 2, 1 if heights[0] >= heights[1] else -1
    return [middle + sign * gap / 2, middle - sign * gap / 2]


def mark(axes: Axes, x: float, y: float, text: str, side: str, *, below: bool = False) -> None:
    """A point with its label; ``side`` is the side of the label that is aligned."""
    axes.plot(
        x, y, "o", color=WARM, markersize=8, markeredgecolor=PAPER, markeredgewidth=1.5, zorder=3
    )
    offset = (5 if side == "left" else 0, -17 if below else 8)
    axes.annotate(
        text, (x, y), offset, textcoords="offset points", ha=side, color=WARM, weight="bold"
    )


def titles(axes: Axes, vertical: str, horizontal: str) -> None:
    """Axis names that read without turning one's head."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.text(0, 0.94, vertical, color=INK)
    axes.set_xlabel(horizontal, loc="right", fontsize=9.5, labelpad=3)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


@contextmanager
def figure_style(name: str) -> Iterator[None]:
    """The pages' style, whatever the user has set; matplotlib's own settings come back."""
    with (
        style.context(_STYLE, after_reset=True),
        mpl.rc_context({"svg.hashsalt": f"dpoptim {name}"}),  # the same run makes the same bytes
    ):
        yield


def new_axes() -> Axes:
    """An empty picture; never through pyplot, whose state belongs to the user."""
    figure = Figure(figsize=(4.4, 3.1))
    figure.patch.set_visible(False)
    axes = figure.add_axes((0.115, 0.16, 0.855, 0.71))
    axes.patch.set_visible(False)
    return axes


def inline_svg(axes: Axes, name: str) -> str:
    """The picture as an element inside an HTML page: no prologue, metadata or outside names."""
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
