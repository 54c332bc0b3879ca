"""A run killed at any moment: the ledger never shows less than was released."""

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import dpoptim
from dpoptim.accounting.event_json import event_to_json
from forked import needs_fork

# One process imports and plans; every run is a fork of it, so that eight runs do not pay for
# eight imports of torch.
NURSERY = """
import functools, os, sys, torch, dpoptim
from torch.utils.data import TensorDataset

torch.set_num_threads(1)  # a fork does not inherit a thread pool
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports half of torch
plan = dpoptim.DPSGD(clip_norm=1.0).plan(
    n=50, batch_size=10, steps=10_000, noise_multiplier=5.0, delta=1e-5)

def run(ledger, steps, say):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(50, 4), torch.randint(0, 2, (50,)))
    say("ready", os.getpid())
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
        for x, y in private.batches():
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            # The first release leaves the process: from here on somebody else has seen a noisy
            # step.
            say("released", private.steps_done)
            if private.steps_done == steps:
                return

run(dpoptim.Ledger(), 1, lambda *said: None)  # what a first run imports, the others need not

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(dpoptim.Ledger(sys.argv[1]), plan.steps, functools.partial(print, flush=True))
        os._exit(0)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@needs_fork
def test_sigkill_at_a_random_step_never_undercounts(tmp_path: Path) -> None:
    """Eight runs on one ledger, each killed somewhere between its start and its hundredth
    step.
    """
    path = tmp_path / "ledger.sqlite"
    expected = event_to_json(
        dpoptim.DPSGD(clip_norm=1.0)
        .plan(n=50, batch_size=10, steps=10_000, noise_multiplier=5.0, delta=1e-5)
        .event
    )
    runs_that_released = 0
    chance = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(8):
            nursery.stdin.write("run\n")
            word, process = nursery.stdout.readline().split()
            assert word == "ready"
            wanted = chance.choice([0, 0, 0, 1, 1, 2, 10, 100])
            lines = [nursery.stdout.readline() for _ in range(wanted)]
            if wanted == 0:
                select.select([], [], [], chance.random() / 50)  # anywhere around the reservation
            os.kill(int(process), signal.SIGKILL)
            while (line := nursery.stdout.readline()) != "gone\n":
                lines.append(line)
            runs_that_released += any(line.startswith("released") for line in lines)
            with dpoptim.Ledger(path) as ledger:
                entries = ledger.entries()
                assert len(entries) >= runs_that_released
                assert all(event_to_json(e.event) == expected for e in entries)
                # none was completed, all of them count
                assert all(e.state == "open" for e in entries)
        nursery.stdin.close()
    assert runs_that_released >= 5
