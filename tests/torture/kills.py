"""Runs killed at any moment and taken up again: the ledger never shows fewer releases than were
made.

An observer in the killed process reports each release by a pipe as soon as the gate has made it.
"""

import os
import random
import select
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPFTRL, DPSGD, DiceSGD, Ledger, LedgerError
from dpoptim.gate import Gate
from dpoptim.plan import Plan
from torture.outcomes import Outcomes

N, STEPS = 60, 30
COMPLETED, REFUSED = 7, 8  # exit codes of a child


def plans() -> list[Plan]:
    once = {"noise_multiplier": 5.0, "delta": 1e-5, "neighboring": "zero-out"}
    return [
        DPSGD(1.0).plan(n=N, batch_size=10, steps=STEPS, noise_multiplier=5.0, delta=1e-5),
        DPFTRL(1.0).plan(n=N, batch_size=2, epochs=1, **once),
        DiceSGD(1.0).plan(n=N, batch_size=4, epochs=2, **once),
    ]


def trial(folder: Path, *, seed: int, kills: int) -> Outcomes:
    """So many kills, on one ledger for each neighbouring relation; runs that are completed make
    room for new ones.
    """
    outcomes, chance = Outcomes("kills with resume"), random.Random(seed)
    seen: Counter[str] = Counter()  # releases by reservation
    folders = [folder / str(number) for number in range(3)]
    for place in folders:
        place.mkdir()
    torch.set_num_threads(1)  # a fork does not inherit a thread pool
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports half of torch
    for number in range(kills):
        which = number % 3
        place, plan = folders[which], plans()[which]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _train(plan, place, writer)
        os.close(writer)
        code = _kill(child, reader, seen, chance)
        os.close(reader)
        if code in (COMPLETED, REFUSED):
            (place / "run.secret").unlink(missing_ok=True)
            outcomes.add("runs completed" if code == COMPLETED else "completed, so refused")
        elif code == -signal.SIGKILL:
            outcomes.add("killed")
        else:
            outcomes.add("tracebacks", wrong=f"{place.name}: a child ended with {code}")
        check(place / "ledger", plan, seen, outcomes)
    outcomes.add("releases seen")
    outcomes.counts["releases seen"] = sum(seen.values())
    for place in folders:
        litter = [name for name in os.listdir(place) if name.startswith(".dpoptim-")]
        if len(litter) > 1:  # of the last one killed; the next start removes it
            outcomes.add("left behind", wrong=f"{place.name}: {litter}")
    return outcomes


def check(path: Path, plan: Plan, seen: Counter[str], outcomes: Outcomes) -> None:
    """The ledger against the observer."""
    if not path.exists():
        return
    for entry in Ledger(path).entries():
        shown = (plan.steps if entry.state == "committed" else entry.begun) + entry.repeated
        if seen[entry.id] > shown:
            outcomes.add(
                "undercounted",
                wrong=f"{path.parent.name}: {seen[entry.id]} released, {shown} in the ledger",
            )
        if entry.event != plan.event:
            outcomes.add("changed charges", wrong=str(entry))


def _kill(child: int, reader: int, seen: Counter[str], chance: random.Random) -> int:
    """Wait for some releases, then a little, and kill. Returns the exit code."""
    wanted, buffer = chance.choice([0, 0, 1, 2, 5, 12, 60]), b""
    while buffer.count(b"\n") < wanted:
        piece = os.read(reader, 4096)
        if not piece:
            break
        buffer += piece
    select.select([], [], [], chance.random() * (0.15 if wanted == 0 else 0.01))
    os.kill(child, signal.SIGKILL)
    while piece := os.read(reader, 4096):
        buffer += piece
    for line in buffer.split(b"\n"):
        if len(line) == 32:
            seen[line.decode()] += 1
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(plan: Plan, place: Path, writer: int) -> None:
    """In the child: train with a checkpoint every few steps; never returns."""
    code = 1
    try:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", dpoptim.LossNotCheckedWarning)
        original = Gate.release_sum

        def observed(gate: Gate, sums: list[torch.Tensor]) -> list[torch.Tensor]:
            released = original(gate, sums)
            assert gate.reservation is not None
            os.write(writer, gate.reservation.id.encode() + b"\n")
            return released

        Gate.release_sum = observed  # type: ignore[assignment,method-assign]
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(N, 4), torch.randint(0, 2, (N,)))
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        path = place / "run.secret"
        ledger = Ledger(place / "ledger", neighboring=plan.neighboring)
        resume = path if path.exists() else None
        private = dpoptim.attach(plan, model, optimizer, data, ledger=ledger, resume=resume)
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done % 3 == 0:
                private.save(path)
        code = COMPLETED
    except LedgerError as error:
        code = REFUSED if "was completed" in str(error) else 1
        if code == 1:
            print(error, file=sys.stderr)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)
