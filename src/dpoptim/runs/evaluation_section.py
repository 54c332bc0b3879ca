"""The report's section on private hold-out records: what `dpoptim evaluate` has released, drawn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.documents import dump, sha256_of, with_digest
from dpoptim.evaluation import ClassifierScores, RegressorScores
from dpoptim.evaluation.evaluate import HIDDEN
from dpoptim.evaluation.intervals import Interval, receiver_curve
from dpoptim.evaluation.scored_records import TRAINING, Records
from dpoptim.files import turn_in, write_atomically
from dpoptim.runs.drawing import (
    ACCENT,
    INK,
    MUTED,
    WARM,
    figure_style,
    inline_svg,
    new_axes,
    power_of_ten,
    titles,
)
from dpoptim.runs.evaluations import (
    FORMAT,
    NAME,
    SECTIONS,
    SELECTED,
    Evaluation,
    costs_together,
    headline,
    in_words,
    read_evaluations,
)
from dpoptim.runs.page import card, escape, facts, figure, grid, number, percent

BEGIN, END = "<!-- evaluation -->", "<!-- end of evaluation -->"
NO_EVALUATION = BEGIN + END  # in a report, until there is one
MOST_CLASSES = 30  # of a table that people can read
REPORT = "report.html"
HEADINGS = ("#", "time", "records", "score", "alone", "ledger")
TICKS = (0, 0.25, 0.5, 0.75, 1)


def keep_evaluation(folder: Path, found: Evaluation, classes: Sequence[str]) -> bool:
    """Write an evaluation down beside the model, and draw all of them into the run's report.

    A signature of those before is removed: it does not cover this one.

    Args:
        classes: their names; public. None of a model that predicts a number.

    Returns:
        whether there is a report that has a place for them.

    Raises:
        ValueError: the file there is damaged or was edited. OSError: naming the path.
    """
    with turn_in(folder):
        before = read_evaluations(folder)
        entries = [*before["evaluations"], found.to_json()]
        sums = costs_together(entries)
        section = evaluation_section(found.scores, classes, found.records)
        section = section + all_of_them(entries, sums)
        report = folder / REPORT
        parts = parts_of(text_of(report)) if report.is_file() else None
        document = {
            "format": FORMAT,
            "evaluations": entries,
            "together": sums,
            "report_section_sha256": None if parts is None else sha256_of(section),
            # which the report shows until it is written: for ever, after a power cut
            "section_before_sha256": None if parts is None else shown_digest(parts[1], before),
        }
        (folder / NAME).with_suffix(".sig").unlink(missing_ok=True)
        write_atomically(folder / NAME, dump(with_digest(document)) + "\n")
        if parts is not None:
            page = f"{parts[0]}{BEGIN}{section}{END}{parts[2]}"
            write_atomically(report, page.encode("utf-8", "surrogateescape"))
    return parts is not None


def shown_digest(section: str, document: Mapping[str, Any]) -> str | None:
    """Digest of a report's section, if the record of evaluations names it."""
    shown = sha256_of(section)
    return shown if shown in [document[name] for name in SECTIONS] else None


def text_of(path: Path) -> str:
    """A file as text that holds each of its bytes, whatever they are."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def parts_of(page: str) -> tuple[str, str, str] | None:
    """A report before, in and after its section of evaluations; None of a page without one."""
    before, begin, rest = page.partition(BEGIN)
    section, end, after = rest.partition(END)
    return (before, section, after) if begin and end else None


def evaluation_section(
    scores: ClassifierScores | RegressorScores,
    classes: Sequence[str],
    records: Records = "hold-out",
) -> str:
    """The scores as HTML.

    Args:
        classes: their names; public. None of a model that predicts a number.
        records: what they were to the model.

    **Guarantee.** Made from released figures alone.
    """
    guarantee = scores.guarantee
    drawn = (
        _classifier(scores, classes) if isinstance(scores, ClassifierScores) else _regressor(scores)
    )
    confidence = (
        100 * (scores.accuracy if isinstance(scores, ClassifierScores) else scores.r2).confidence
    )
    notes = "".join(
        f'<p class="note">{escape(note)}</p>'
        for note in guarantee.notes
        if "not for release" in note or note == TRAINING
    )
    where = {
        "hold-out": "private hold-out records",
        "training": "the private records that it was trained on",
    }
    of = {"hold-out": " of the hold-out", "training": ""}[records]
    return (
        f"<section><h2>How good it is on {where[records]}</h2>"
        '<p class="lead">Noisy figures, released for '
        f"ε ≤ {rounded_up(guarantee.epsilon)} at δ = {power_of_ten(guarantee.delta)} per "
        f"{escape(guarantee.unit)}{of}, on top of the training. Intervals of "
        f"{confidence:g} % count the noise and the sample.</p>{notes}{drawn}"
        f'<p class="small">{escape(str(guarantee))}</p></section>'
    )


def all_of_them(entries: Sequence[Mapping[str, Any]], sums: Sequence[Mapping[str, Any]]) -> str:
    """Every evaluation that the run directory knows of, and what they cost together, as HTML."""
    rows = []
    for place, entry in enumerate(entries, 1):
        measure, score = headline(entry)
        rows.append(
            (
                str(place),
                entry["made"][:16].replace("T", " "),
                f"{entry['data']}, {entry['records']}",
                f"{measure} {score}",
                f"ε ≤ {rounded_up(float(entry['guarantee']['epsilon']))}",
                "none" if entry["ledger"] is None else entry["ledger"]["file"],
            )
        )
    chosen = f'<p class="note">{SELECTED[0].upper()}{SELECTED[1:]}.</p>' * (len(entries) > 1)
    apart = '<p class="small">Of different relations or units each has a sum of its own.</p>'
    costs = "".join(f'<p class="small">{escape(in_words(found))}</p>' for found in sums)
    costs += apart * (len(sums) > 1)
    return (
        f"<section><h2>Every evaluation that was kept</h2>{chosen}"
        f"{card(grid(HEADINGS, rows))}{costs}</section>"
    )


def _classifier(scores: ClassifierScores, classes: Sequence[str]) -> str:
    cells = [
        ("Accuracy", percent(scores.accuracy.value), interval_in_words(scores.accuracy, percent)),
        ("Largest class", percent(scores.majority.value), "accuracy of naming it always"),
    ]
    if scores.auc is not None:
        cells.append(
            ("AUC", "\N{EN DASH}", HIDDEN)
            if scores.auc.hidden
            else ("AUC", number(scores.auc.value), interval_in_words(scores.auc, number))
        )
    cells.append(
        ("Log-loss", number(scores.log_loss.value), interval_in_words(scores.log_loss, number))
    )
    pictures = [
        figure(
            calibration_figure(scores),
            "How often it is right, by how sure it says to be: bars are the intervals, the line "
            "is what they should be.",
        )
    ]
    if scores.auc is not None:
        pictures.insert(
            0,
            figure(
                receiver_figure(scores),
                "True against false positives of the second class, from a noisy histogram of "
                f"{scores.histogram.shape[1]} bins.",
            ),
        )
    if len(classes) <= MOST_CLASSES:
        pictures.append(confusion_table(scores, classes))
    cards = "".join(map(card, pictures))
    return f'{facts(cells)}<div class="pair below">{cards}</div>'


def _regressor(scores: RegressorScores) -> str:
    error = scores.squared_error
    root = Interval(error.value**0.5, error.low**0.5, error.high**0.5, error.confidence)
    cells = [
        ("R2", number(scores.r2.value), interval_in_words(scores.r2, number)),
        (
            "Root of the mean squared error",
            f"{root.value:.4g}",
            interval_in_words(root, "{:.4g}".format),
        ),
    ]
    caption = "R2 with its interval: 0 is the mean of the targets, 1 is without error."
    picture = figure(interval_figure(scores.r2), caption)
    lost = (
        '<p class="note">The noise hides what is measured here. More records, a larger epsilon or '
        "narrower bounds of the target make it less.</p>"
    ) * (scores.r2.high - scores.r2.low > 1)
    return f'{facts(cells)}{lost}<div class="pair below">{card(picture)}</div>'


def confusion_table(scores: ClassifierScores, classes: Sequence[str]) -> str:
    """True classes in rows, predicted ones in columns; the shade is the share of the row."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in classes)
    rows = ""
    for name, counts in zip(classes, scores.confusion, strict=True):
        total = max(float(counts.clip(0).sum()), 1.0)
        body = "".join(
            f'<td style="--share:{100 * float(count) / total:.0f}%">{count:,.0f}</td>'
            for count in counts.clip(0)
        )
        rows += f'<tr><th scope="row">{escape(name)}</th>{body}</tr>'
    lost = int((scores.confusion < 0).sum())
    below = '<p class="small">Counts that the noise took below 0 are shown as 0.</p>' * (lost > 0)
    return (
        '<h3>Noisy counts</h3><div class="scroll"><table class="grid confusion"><thead><tr>'
        f"<th>true \N{DOWNWARDS ARROW} predicted \N{RIGHTWARDS ARROW}</th>{top}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{below}"
    )


def receiver_figure(scores: ClassifierScores) -> str:
    false, true = receiver_curve(scores.histogram)
    with figure_style("receiver"):
        axes = new_axes()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(false, true, color=ACCENT, marker="o", markersize=3)
        axes.text(0.58, 0.46, "guessing", color=MUTED)
        square(axes)
        titles(axes, "true positives", "false positives")
        return inline_svg(axes, "receiver")


def calibration_figure(scores: ClassifierScores) -> str:
    """The share that is right in each bin that the noise leaves something of."""
    with figure_style("calibration"):
        axes = new_axes()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for each in scores.calibration:
            middle = (each.low + each.high) / 2
            axes.plot([middle] * 2, [each.share.low, each.share.high], color=ACCENT, linewidth=1.4)
            axes.plot(middle, each.share.value, "o", color=ACCENT, markersize=4.5)
        if not scores.calibration:
            axes.text(0.5, 0.5, "all bins are lost in the noise", color=INK, ha="center")
        square(axes)
        share = "in the second class" if scores.auc is not None else "right"
        titles(axes, f"share that is {share}", "predicted probability")
        return inline_svg(axes, "calibration")


def interval_figure(found: Interval) -> str:
    with figure_style("interval"):
        axes = new_axes()
        low = max(min(0.0, found.low), -1.0)
        axes.plot([max(found.low, low), found.high], [0, 0], color=ACCENT, linewidth=3)
        axes.plot(max(found.value, low), 0, "o", color=WARM, markersize=9, clip_on=False)
        if found.low < low:  # it goes on to the left
            axes.plot(low, 0, "<", color=ACCENT, markersize=9, clip_on=False)
        axes.text(max(found.value, low), 0.25, number(found.value), color=WARM, ha="center")
        axes.set_xlim(low - 0.02, 1.02)
        axes.set_ylim(-1, 1)
        axes.set_yticks([])
        titles(axes, "R2", "")
        axes.grid(axis="x")
        return inline_svg(axes, "interval")


def square(axes: Axes) -> None:
    """Shares on both axes; 0 % is said once."""
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(-0.01, 1.01)
    axes.set_xticks(TICKS)
    axes.set_yticks(TICKS, ["", *(f"{tick:.0%}" for tick in TICKS[1:])])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def interval_in_words(found: Interval, said: Callable[[float], str]) -> str:
    return f"{said(found.low)} to {said(found.high)}"
