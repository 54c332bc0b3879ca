"""What torch.compile compiles of an attached model: graphs (forward passes; each has a backward
pass where it trains) and pieces of Python, in all, after each of these events.

Steps on 8 records, an evaluation, steps with other numbers of records, and nine more engines of
the same model. Nothing is timed: graphs run as they are.

Run: ``python benchmarks/compiled_graphs.py [--rows GPT ...]``.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator

import torch
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.training.trials.isolation import choose_isolation
from steps import made
from workloads import WORKLOADS, Workload

RECORDS, OTHER_SIZES, MORE_ENGINES = 8, (7, 5, 6), 9
ROWS = ("MLP 784-256-10", "GELU written out", "GPT", "GPT, LoRA")


class Compiled:
    """A model that was compiled after attaching, with its own engine."""

    def __init__(self, work: Workload, backend: Callable[..., object]) -> None:
        self.model, self._x, self._y = made(work, "cpu")
        self._loss = work.loss
        isolation = choose_isolation(self.model, TensorDataset(self._x, self._y)).isolation
        self._engine = Engine(
            self.model, Clipping(1.0), capacity=RECORDS, reduction="sum", isolation=isolation
        )
        self._engine.attach()
        self._run = torch.compile(self.model, backend=backend)

    def step(self, records: int = RECORDS) -> None:
        self._engine.begin_microbatch(records)
        self._loss(self._run(self._x[:records]), self._y[:records], "none").sum().backward()
        self._engine.take()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self._run(self._x[:RECORDS])
        self.model.train()


def counted(work: Workload) -> Iterator[tuple[str, int, int]]:
    """Events, and what was compiled until then: graphs and pieces of Python."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    counters.clear()
    first = Compiled(work, backend)
    engines = [first]

    def add_engines() -> None:
        for _ in range(MORE_ENGINES):
            engines.append(Compiled(work, backend))
            engines[-1].step()

    events: dict[str, Callable[[], object]] = {
        "two steps": lambda: (first.step(), first.step()),
        "an evaluation": first.evaluate,
        "a step": first.step,
        "other sizes": lambda: [first.step(records) for records in OTHER_SIZES],
        "nine engines": add_engines,
    }
    for name, event in events.items():
        event()
        yield name, len(graphs), counters["frames"]["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(WORKLOADS))
    warnings.simplefilter("ignore")
    for i, title in enumerate(parser.parse_args().rows):
        found = list(counted(WORKLOADS[title]))
        if not i:
            print(f"| model | {' | '.join(name for name, *_ in found)} |")
            print("|---" * (len(found) + 1) + "|")
        print(f"| {title} | {' | '.join(f'{graphs}, {code}' for _, graphs, code in found)} |")


if __name__ == "__main__":
    main()
