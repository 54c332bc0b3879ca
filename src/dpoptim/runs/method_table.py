"""The table of methods, made from the registry: for the command line and the documents."""

from dataclasses import fields

from dpoptim.estimators.solving import option_names
from dpoptim.plan import Plan
from dpoptim.registry import Entry, entries

DELTA = 1e-5


def method_rows() -> list[dict[str, str]]:
    """Return a row for each method: its idea, models, settings, relations and audit."""
    return [row_of(each) for each in entries().values()]


def row_of(entry: Entry) -> dict[str, str]:
    plan = example(entry)
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
        "neighbouring relations": ", ".join(plan.sampler.relations),
        "attacked by": plan.mechanism.audit_family(plan.shape),
    }


def example(entry: Entry) -> Plan:
    """Return a small plan of the method at its default settings."""
    if entry.solver:
        plan: Plan = entry.make(entry.name, 1.0).plan(n=100, noise_multiplier=1.0, delta=DELTA)
        return plan
    plan = entry.make(clip_norm=1.0).plan(
        n=100, batch_size=10, epochs=1, noise_multiplier=1.0, delta=DELTA
    )
    return plan


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
