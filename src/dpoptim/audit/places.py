"""Runs that rest on where records lie, taken up with records that lie elsewhere: to be refused.

A split or shuffle without a seed is another one in the program that resumes. Who has taken part
already would do so again as somebody else, beyond what the run is charged for.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.methods import DPFTRL, DiceSGD
from dpoptim.plan import Plan
from dpoptim.training.attach import attach

RECORDS, PASSES, PER_BATCH = 12, 2, 4
METHODS = (
    DPFTRL(1.0),
    DPFTRL(1.0, sampling="cyclic-poisson", bands=3),
    DPFTRL(1.0, sampling="balls-in-bins", bands=3),
    DPFTRL(1.0, sampling="b-min-sep", bands=3),
    DiceSGD(1.0),
)


def places() -> str:
    """Resume runs of each sampler with the records as they were, and with others in their place."""
    found = []
    steps = PASSES * RECORDS // PER_BATCH
    for method in METHODS:
        plan = Plan(method, RECORDS, PER_BATCH, steps, 1.0, "zero-out", 1e-3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            one_step(plan, 0, save=path)
            for rolled, right in ((0, True), (1, False)):
                if goes_on(plan, rolled, path) != right:
                    said = "lost the records of" if right else "went on with records elsewhere:"
                    found.append(f"{said} {plan.sampler.promise()}")
    return f"refuted: {'; '.join(found)}" if found else ""


def goes_on(plan: Plan, rolled: int, path: Path) -> bool:
    """Whether a run is taken up on data in this order."""
    try:
        one_step(plan, rolled, resume=path)
    except ValueError:
        return False
    return True


def one_step(plan: Plan, rolled: int, save: Path | None = None, resume: Path | None = None) -> None:
    """A step on data in this order."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = TensorDataset(torch.arange(float(RECORDS))[:, None].roll(rolled, 0))
    with attach(plan, model, optimizer, records, noise_seed=1, resume=resume) as private:
        for (x,) in private.batches():
            private.backward(model(x)[:, 0])
            optimizer.step()
            break
        if save is not None:
            private.save(save)
