"""Memory exhausted at each tensor operation of a run in turn: what was released is counted, said,
or done again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPSGD, Ledger
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from torture.outcomes import Outcomes

STEPS = 3


class Exhausted(TorchDispatchMode):
    """Raises at one operation, by its number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError(f"at operation {self.at}")
        return func(*args, **(kwargs or {}))


class Run:
    """One training, whose releases are counted."""

    def __init__(self, folder: Path, number: int) -> None:
        torch.manual_seed(0)
        self.data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.plan = DPSGD(1.0).plan(
            n=40, batch_size=10, steps=STEPS, noise_multiplier=2.0, delta=1e-5
        )
        self.ledger = Ledger(folder / f"ledger-{number}")
        self.released = 0
        self.private = dpoptim.attach(
            self.plan, self.model, self.optimizer, self.data, ledger=self.ledger
        )

    def train(self) -> None:
        for x, y in self.private.batches():
            self.private.backward(F.cross_entropy(self.model(x), y, reduction="none"))
            self.optimizer.step()


def trial(folder: Path, *, seed: int, every: int = 1) -> Outcomes:
    """Fail at operation `seed` modulo `every`, and at each so many after it."""
    outcomes = Outcomes("memory exhausted")
    whole = Run(folder, 0)
    with Exhausted(-1) as counting:
        whole.train()
    total = counting.count
    original = Gate.release_sum
    for at in range(1 + seed % every, total + 1, every):
        run = Run(folder, at)

        def observed(gate: Gate, sums: Any, run: Run = run) -> Any:
            released = original(gate, sums)
            run.released += 1
            return released

        Gate.release_sum = observed  # type: ignore[method-assign]
        try:
            _fail_and_go_on(run, at, outcomes)
        finally:
            Gate.release_sum = original  # type: ignore[method-assign]
            run.private.detach()
        entries = run.ledger.entries()
        shown = 0 if not entries else STEPS if entries[0].state == "committed" else entries[0].begun
        if run.released > shown or run.released > STEPS or len(entries) > 1:
            outcomes.add(
                "undercounted", wrong=f"operation {at}: {run.released} released, {entries}"
            )
    return outcomes


def _fail_and_go_on(run: Run, at: int, outcomes: Outcomes) -> None:
    """Let one operation fail; then do what the messages say, until the plan is done or the run is
    said to be over.
    """
    try:
        with Exhausted(at):
            run.train()
        outcomes.add("not reached")
        return
    except torch.OutOfMemoryError:
        pass
    except PrivacyError as error:
        outcomes.add("tracebacks", wrong=f"operation {at}: {error}")
        return
    for _ in range(3):
        try:
            run.train()
        except PrivacyError as error:
            text = str(error)
            if "optimizer.step() again" in text:
                run.optimizer.step()
                continue
            if "go on from a checkpoint" in text:
                outcomes.add("said to be over")
                return
            if "planned steps are done" in text:
                break
            outcomes.add("tracebacks", wrong=f"operation {at}: then {text}")
            return
        break
    if run.private.steps_done == STEPS and run.released == STEPS:
        outcomes.add("gone on to the end")
    else:
        outcomes.add("steps lost", wrong=f"operation {at}: {run.released} of {STEPS} released")
