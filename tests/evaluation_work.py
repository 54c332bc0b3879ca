"""What ranks do that score a model in training on private records."""

import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpoptim
from distributed_work import METHODS, model_of, plan_for, records, spread

HELD_OUT = 50
COST: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "n": HELD_OUT, "noise_seed": 0}


def scored(rank: int, way: str, path: str) -> dict[str, Any]:
    """Scores after the first step and at the end of a run, and the ledger's entries."""
    model = model_of()
    called = spread(model, way)
    hold_out = TensorDataset(*(each[:HELD_OUT] for each in records(80)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same model in any processes
    plan = plan_for(METHODS["flat"](), steps=3, noise_multiplier=2.0)
    with dpoptim.Ledger(path, epsilon=8.0, delta=1e-4) as ledger:
        scores = []
        with dpoptim.attach(
            plan, called, optimizer, TensorDataset(*records()), ledger=ledger
        ) as private:
            for x, y in private.batches():
                private.backward(F.cross_entropy(called(x), y, reduction="none"))
                optimizer.step()
                optimizer.zero_grad()
                if private.steps_done in (1, 3):
                    scores.append(private.evaluate(hold_out, **COST))
            refused = said_of(lambda: private.evaluate(hold_out, **COST | {"epsilon": 20.0}))
            theirs = dpoptim.Ledger()
            private.evaluate(hold_out, **COST, ledger=theirs)
        return {
            "scores": [each.confusion for each in scores],
            "guarantees": [each.guarantee.epsilon for each in scores],
            "refused": refused,
            "left": str(ledger.remaining()),
            "entries": [entry.label for entry in ledger.entries()],
            "of others": len(theirs.entries()),
        }


def in_groups(rank: int, folder: str) -> dict[str, Any]:
    """What a run of ranks 1 and 2 scores, and one of rank 0 alone, each on a ledger of its own."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    mine = min(rank, 1)
    model, (x, y) = model_of(), records(HELD_OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    plan = plan_for(METHODS["flat"](), steps=1, noise_multiplier=2.0)
    data = TensorDataset(*records())
    with dpoptim.Ledger(f"{folder}/{mine}.sqlite", epsilon=8.0, delta=1e-4) as ledger:
        with dpoptim.attach(
            plan, model, optimizer, data, ledger=ledger, process_group=groups[mine]
        ) as private:
            scores = private.evaluate(TensorDataset(x, y), **COST)
            private.finish()
        return {"scores": scores.confusion, "entries": [each.label for each in ledger.entries()]}


def mistaken(rank: int, how: str) -> str:
    """What a rank hears where rank 1 scores other records, fails in one, or does not score."""
    model = model_of()
    x, y = records(HELD_OUT + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    plan = plan_for(METHODS["flat"](), steps=1)
    wrong = rank == 1

    def run() -> None:
        with dpoptim.attach(plan, model, optimizer, TensorDataset(*records())) as private:
            for a, b in private.batches():
                private.backward(F.cross_entropy(model(a), b, reduction="none"))
                optimizer.step()
            if how == "others" and wrong:
                private.evaluate(TensorDataset(x, y), **COST)
            elif how == "a failure" and wrong:
                short = [(row[:3], y[0]) for row in x[1:50]]
                private.evaluate([(x[0], y[0]), *short], **COST)  # type: ignore[arg-type]
            elif how != "none" or not wrong:
                private.evaluate(TensorDataset(x[:HELD_OUT], y[:HELD_OUT]), **COST)

    return said_of(run)


def said_of(ask: Any) -> str:
    try:
        ask()
    except Exception as error:
        return traceback.format_exception_only(error)[-1].strip()
    return ""
