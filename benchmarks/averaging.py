"""Gains of averaged iterates over last ones in the runs of `accuracy.py`; nothing is trained.

    python benchmarks/averaging.py --out benchmarks/results

Of every setting that was chosen and tested, in percent of records: the mean of the last fifth, and
of the last half, less the last iterate, both by the mean over seeds; then mean, least and most over
settings, by noise and optimizer. E2E is left out, whose scores are no percentages.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from accuracy import TEST, Row, Table, settings
from one_table import write_table

TABLES = ("mechanisms", "optimizers")
ADAPTERS = "emotion, LoRA"
RESULTS = Path(__file__).parent / "results"


def kind(row: Row) -> str:
    """Noise, and optimizer where it is not SGD."""
    made = row.method if row.optimizer == "SGD" else row.optimizer
    return f"{made}, adapters" if row.task == ADAPTERS else made


def lines(results: Path = RESULTS) -> Iterator[dict[str, object]]:
    """Lines of the table."""
    gains: dict[str, dict[object, list[tuple[float, float]]]] = {}
    for name in TABLES:
        for row in Table(results / f"accuracy_{name}.csv").rows:
            if row.part == TEST and not row.task.startswith("E2E"):
                of_setting = gains.setdefault(kind(row), {}).setdefault((name, settings(row)), [])
                of_setting.append((row.fifth - row.last, row.half - row.last))
    for each, found in gains.items():
        fifth, half = ([mean(run[i] for run in runs) for runs in found.values()] for i in (0, 1))
        line: dict[str, object] = {"noise or optimizer": each, "settings": len(found)}
        for part, values in (("fifth", fifth), ("half", half)):
            line |= {
                part: round(mean(values), 2),
                f"least {part}": round(min(values), 2),
                f"most {part}": round(max(values), 2),
            }
        yield line


if __name__ == "__main__":
    write_table("averaging", __doc__, lines())
