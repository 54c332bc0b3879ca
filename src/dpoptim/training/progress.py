"""A progress bar of public figures: steps of the plan, time, speed, epsilon reserved."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class StepsPerSecond(ProgressColumn):
    """How many steps a second were done lately."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g} steps/s")


def show_progress(
    items: Iterable[Any],
    done: Callable[[], int],
    total: int,
    label: str,
    console: Console | None = None,
) -> Iterator[Any]:
    """The items, one after the other, beside a bar that counts what ``done`` says.

    Args:
        items: of a loop; microbatches or steps.
        done: steps of the plan so far.
        total: steps of the plan.
        label: shown before the bar.
        console: where; None: the terminal or notebook.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        StepsPerSecond(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=total, completed=done())
        for item in items:
            yield item
            bar.update(task, completed=done())
        bar.update(task, completed=done())
