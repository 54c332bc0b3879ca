"""The table of methods, made from the registry: for the command line and the documents."""

from collections.abc import Iterable
from dataclasses import fields

from dpoptim.estimators.solving import option_names
from dpoptim.plan import Plan
from dpoptim.registry import Entry, entries

DELTA = 1e-5


def method_rows() -> list[dict[str, str]]:
    """Return a row for each method: its idea, models, settings, relations and audit."""
    return [row_of(each) for each in entries().values()]


def row_of(entry: Entry) -> dict[str, str]:
    plans = examples(entry)
    settings = (
        list(option_names(entry.name))
        if entry.solver
        else [field.name for field in fields(entry.make)]  # type: ignore[arg-type]
    )
    return {
        "method": entry.name,
        "what it is": entry.summary,
        "trains": entry.trains,
        "settings": ", ".join(settings),
        "neighbouring relations": each(name for plan in plans for name in plan.sampler.relations),
        "attacked by": each(plan.mechanism.audit_family(plan.shape) for plan in plans),
    }


def examples(entry: Entry) -> list[Plan]:
    """Return small plans of the method: at its default settings, and of what it plans by itself."""
    if entry.solver:
        return [entry.make(entry.name, 1.0).plan(n=100, noise_multiplier=1.0, delta=DELTA)]
    run = {"n": 100, "batch_size": 10}
    return [
        method.plan(**run, epochs=1, noise_multiplier=1.0, delta=DELTA)
        for method in entry.make(clip_norm=1.0).variants(**run)
    ]


def each(words: Iterable[str]) -> str:
    """Join words, each once."""
    return ", ".join(dict.fromkeys(words))


def markdown_table() -> str:
    """Return the page ``docs/methods.md``."""
    rows = method_rows()
    lines = [
        "# Methods",
        "",
        "Made from the registry by `dpoptim methods --markdown`. Methods of other packages, listed "
        "by an entry point in the",
        "group `dpoptim.methods`, appear in the command's own table.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
    ]
    return "\n".join(lines)
