"""``dpoptim plan`` as text for a terminal, as JSON, and as a page in the report's style."""

import shlex
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.plan.text import of_each
from dpoptim.planning import EpsilonAtMost, Plans, Setting, learning_rate
from dpoptim.planning.choice import PREDICTED
from dpoptim.runs import page as html
from dpoptim.runs.certificate import FALSE_POSITIVE_RATES, attacker_misses, best_guess, percent_up
from dpoptim.runs.drawing import (
    ACCENT,
    MUTED,
    figure_style,
    inline_svg,
    mark,
    new_axes,
    power_of_ten,
    titles,
)
from dpoptim.runs.report_figures import attacker_figure

HEADINGS = (
    "rank",
    "method",
    "batch",
    "epochs",
    "steps",
    "noise",
    "noise / signal",
    "error / best",
    "time",
)
ROWS = 12
LINES = 3  # numbers of epochs that the first picture draws
MOMENTUM = 0.9
WIDE = 300  # ends of an axis that has powers of ten alone
FOOTER = (
    "Public numbers only; no record was touched. Noise is exact in the chosen row and estimated in "
    "the others; predicted errors rank settings and are no promise."
)


def shown(plans: Plans) -> list[Setting]:
    """The chosen setting, the best of each method and way of sampling, and the next best."""
    chosen = plans.chosen
    of_each_length = [best for best, *_ in by_epochs(plans).values()]
    others = (*plans.best_of_each, *of_each_length)
    found = [chosen]
    for each in others:
        if all((each.name, each.run) != (other.name, other.run) for other in found):
            found.append(each)
    return sorted(found[:ROWS], key=lambda each: rank(plans, each))


def rank(plans: Plans, setting: Setting) -> int:
    """Place among all settings, from 1; the chosen one has its estimate's."""
    return 1 + next(
        place
        for place, each in enumerate(plans.settings)
        if (each.name, each.run) == (setting.name, setting.run)
    )


def row(plans: Plans, setting: Setting) -> tuple[str, ...]:
    """As `HEADINGS` say."""
    return (
        str(rank(plans, setting)),
        setting.name,
        f"{setting.run.batch_size:,}",
        f"{setting.epochs:.3g}",
        f"{setting.run.steps:,}",
        f"{setting.noise_multiplier:.3g}",
        f"{setting.noise_to_signal:.2g}",
        f"{setting.error / plans.settings[0].error:.2f} x",
        "-" if setting.seconds is None else html.duration(setting.seconds),
    )


def suggested_rate(plans: Plans) -> float:
    """Learning rate for SGD with momentum 0.9 and a clip norm of 1."""
    chosen = plans.chosen
    return learning_rate(chosen.noise_to_signal, chosen.run.batch_size, chosen.run.steps, MOMENTUM)


def command(plans: Plans) -> str:
    """The command to run next."""
    chosen, target = plans.chosen, plans.question.target
    budget = (
        ["--epsilon", f"{target.epsilon:g}"]
        if isinstance(target, EpsilonAtMost)
        else ["--noise-multiplier", f"{chosen.noise_multiplier:.17g}"]
    )
    table = () if plans.question.schema is None else ("--schema", plans.question.schema)
    words = [
        *("dpoptim", "train", "--data", "FILE", *table, "--method", chosen.method.name),
        *(word for text in chosen.changes for word in ("--set", text)),
        *("--n", str(plans.question.n), "--neighboring", plans.plan.neighboring, *budget),
        *("--delta", f"{plans.plan.delta:g}", "--batch-size", str(chosen.run.batch_size)),
        *("--epochs", f"{chosen.epochs:g}", "--learning-rate", f"{suggested_rate(plans):g}"),
    ]
    return shlex.join(words)


def to_json(plans: Plans) -> dict[str, Any]:
    """Everything, as JSON can hold it."""

    def described(setting: Setting) -> dict[str, Any]:
        return {
            "method": setting.name,
            "neighboring": setting.run.neighboring,
            "sampling": setting.run.sampler.promise(),
            "batch_size": setting.run.batch_size,
            "epochs": setting.epochs,
            "steps": setting.run.steps,
            "noise_multiplier": setting.noise_multiplier,
            "noise_to_signal": setting.noise_to_signal,
            "predicted_error": setting.error,
            "seconds": setting.seconds,
        }

    return {
        "target": str(plans.question.target),
        "guarantee": plans.plan.guarantee.to_json(),
        "chosen": {**described(plans.chosen), "learning_rate": suggested_rate(plans)},
        "warnings": list(plans.warnings),
        "command": command(plans),
        "settings": [described(each) for each in plans.settings],
    }


def plan_page(plans: Plans, title: str) -> str:
    """The page.

    **Guarantee.** Made from ``plans`` alone, which hold public numbers only.
    """
    sections = [
        top(plans),
        key_facts(plans),
        warned(plans),
        curves(plans),
        table(plans),
        attacker(plans),
        how_to(plans),
    ]
    return html.page("Privacy plan", title, "before any record is touched", sections, FOOTER)


def top(plans: Plans) -> str:
    guarantee = plans.plan.guarantee
    terms = (
        f"at δ = {power_of_ten(guarantee.delta)}",
        plans.plan.neighboring,
        f"{guarantee.accountant} accounting",
        *([f"per {guarantee.unit}"] if guarantee.unit != "record" else []),
    )
    chosen = plans.chosen
    reading = (
        f'<p class="reading">{html.escape(chosen.method.name)} with batches of '
        f"{chosen.run.batch_size:,} {plans.plan.unit.name}s, {chosen.epochs:.3g} epochs. "
        f"Asked for: {html.escape(str(plans.question.target))}.</p>"
    )
    return html.hero(
        "proven", "Planned", html.at_most(rounded_up(guarantee.epsilon)), terms, reading
    )


def key_facts(plans: Plans) -> str:
    chosen, question = plans.chosen, plans.question
    unit = question.unit.name
    return html.facts(
        [
            (f"{unit.title()}s", f"{question.n:,}", "a public number"),
            ("Parameters", f"{question.parameters:,}", "trained"),
            (
                "Noisy steps",
                f"{chosen.run.steps:,}",
                of_each(unit, chosen.run.sampler.promise()),
            ),
            ("Noise multiplier", f"{chosen.noise_multiplier:.4g}", "noise / clip norm"),
            ("Noise to signal", f"{chosen.noise_to_signal:.2g}", "of one step, at least"),
            (
                "Time",
                "—" if chosen.seconds is None else html.duration(chosen.seconds),
                "estimated for this machine",
            ),
        ]
    )


def warned(plans: Plans) -> str:
    if not plans.warnings:
        return ""
    body = f"<h3>Before you rely on it</h3>{html.bullets(plans.warnings)}"
    return f"<section>{html.card(body, 'open')}</section>"


def curves(plans: Plans) -> str:
    of = f"Predicted error of {plans.chosen.name}"
    sizes = html.figure(
        batch_figure(plans), f"{of} over the batch size, relative to the best of all settings."
    )
    epochs = html.figure(
        epochs_figure(plans), f"{of} at the best batch size for each number of epochs."
    )
    return html.section(
        "Batch size and epochs",
        f'<div class="pair">{html.card(sizes)}{html.card(epochs)}</div>',
        "The predicted error falls with more epochs, and with larger batches until there are too "
        "few steps. Where a curve is flat, take what is cheaper.",
    )


def table(plans: Plans) -> str:
    rows = shown(plans)
    marked = next(
        place
        for place, each in enumerate(rows)
        if (each.name, each.run) == (plans.chosen.name, plans.chosen.run)
    )
    return html.section(
        "Settings compared",
        html.card(html.grid(HEADINGS, [row(plans, each) for each in rows], marked)),
        "The cheapest setting within 5 % of the best predicted error is taken; ranks among "
        f"{len(plans.settings)} settings. {PREDICTED}.",
    )


def attacker(plans: Plans) -> str:
    plan = plans.plan
    rows = [("A best guess is right", percent_up(best_guess(plan, plan.guarantee)))]
    rows += [
        (f"Found at {rate * 100:g} % false alarms", percent_up(1 - missed))
        for rate, missed in zip(FALSE_POSITIVE_RATES, attacker_misses(plan), strict=True)
    ]
    body = (
        html.figure(attacker_figure(plan), f"Trade-off of the best attacker, {plan.neighboring}.")
        + f"<div><h3>At most</h3>{html.pairs(rows, 'numbers')}"
        f'<p class="small">{html.escape(f"Asked for: {plans.question.target}.")}</p></div>'
    )
    return html.section("What an attacker could do", html.card(body, "beside"))


def how_to(plans: Plans) -> str:
    advice = (
        "Clip norm 1 for features of norm 1 to 10; for another one, divide the learning rate by "
        "it: only their product matters once most gradients are clipped.",
        f"Learning rate about {suggested_rate(plans):g} for SGD with momentum {MOMENTUM:g}; try a "
        "third and three times that on public data.",
        "Average the last half of the iterates: that is post-processing, and free.",
    )
    steps = (
        f'<pre>{html.escape(command(plans))}</pre><div class="trusted">{html.bullets(advice)}</div>'
    )
    return html.section("Run it", html.card(steps))


def batch_figure(plans: Plans) -> str:
    """Predicted error over the batch size, a curve for some numbers of epochs."""
    chosen, best = plans.chosen, plans.settings[0].error
    curves = by_epochs(plans)
    epochs = lines_to_draw(list(curves), round(chosen.epochs))
    with figure_style("batch"):
        axes = new_axes()
        for count in epochs:
            line = sorted(curves[count], key=lambda each: each.run.batch_size)
            sizes = [each.run.batch_size for each in line]
            colour = ACCENT if count == round(chosen.epochs) else MUTED
            axes.plot(sizes, [each.error / best for each in line], color=colour, linewidth=1.8)
            axes.annotate(
                f"{count} epochs" if count > 1 else "1 epoch",
                (sizes[0], line[0].error / best),
                (0, 5),
                textcoords="offset points",
                color=colour,
            )
        logarithmic(axes)
        mark(axes, chosen.run.batch_size, chosen.error / best, "chosen", "left")
        titles(axes, "predicted error over the best", "expected batch size")
        return inline_svg(axes, "batch")


def epochs_figure(plans: Plans) -> str:
    """The best predicted error over the epochs."""
    chosen, best = plans.chosen, plans.settings[0].error
    curves = by_epochs(plans)
    epochs = sorted(curves)
    with figure_style("epochs"):
        axes = new_axes()
        lowest = [min(each.error for each in curves[count]) / best for count in epochs]
        axes.plot(epochs, lowest, color=ACCENT, marker="o", markersize=3.5)
        logarithmic(axes)
        mark(axes, round(chosen.epochs), chosen.error / best, "chosen", "right", below=True)
        axes.margins(y=0.2)  # room for the label
        titles(axes, "predicted error over the best", "epochs")
        return inline_svg(axes, "epochs")


def by_epochs(plans: Plans) -> dict[int, list[Setting]]:
    """The settings of the chosen method and way of sampling."""
    found: dict[int, list[Setting]] = {}
    for each in plans.settings:
        if each.name == plans.chosen.name:
            found.setdefault(max(1, round(each.epochs)), []).append(each)
    return found


def lines_to_draw(epochs: Sequence[int], chosen: int) -> list[int]:
    """The fewest, the chosen number, and one between."""
    ordered = sorted(epochs)
    picked = {ordered[0], max(1, chosen), ordered[len(ordered) // 2]}
    return sorted(picked & set(ordered))[:LINES]


def logarithmic(axes: Any) -> None:
    """Both axes, with few plain numbers."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        subs = (1.0,) if high / low > WIDE else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(10, subs=subs, numticks=8))
        axis.set_major_formatter(plain)
        axis.set_minor_locator(NullLocator())
