"""Runs taken up with what is not theirs: to be refused.

Records that lie elsewhere: a split or shuffle without a seed is another one in the program that
resumes. Who has taken part already would do so again as somebody else, beyond what the run is
charged for. Parts of a checkpoint that were changed, or that another save wrote. And correlated
noise of another strategy, which would not take back what was drawn before.
"""

import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.audit.finding import refuted_by
from dpoptim.gate import CorrelatedSum, Gate
from dpoptim.methods import DPFTRL, DiceSGD
from dpoptim.noise.correlated import BandedToeplitz, BufferedToeplitz, RedrawnToeplitz, Strategy
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.training.attach import attach
from dpoptim.training.checkpoints.rank_files import Place, file_of, with_parts

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
            step_in_order(plan, 0, save=path)
            for rolled, right in ((0, True), (1, False)):
                if goes_on(plan, rolled, path) != right:
                    said = "lost the records of" if right else "went on with records elsewhere:"
                    found.append(f"{said} {plan.sampler.promise()}")
    return refuted_by(found)


def goes_on(plan: Plan, rolled: int, path: Path) -> bool:
    """Whether a run is taken up on data in this order."""
    try:
        step_in_order(plan, rolled, resume=path)
    except ValueError:
        return False
    return True


def step_in_order(
    plan: Plan, rolled: int, save: Path | None = None, resume: Path | None = None
) -> None:
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


KEY = bytes(range(32))
PLACE, ENTRIES = "['memory']", 64  # error feedback, say, whose bound a forged one would not keep


def checkpoint_parts() -> str:
    """Forge a part as others do that can write files: sealed, too, where bytes are those of a save.

    The part of an earlier save of the same run is sealed with the same key, so only the digest in
    the checkpoint tells them apart.
    """
    found = []
    with TemporaryDirectory() as folder:
        for kept, key in (("plain", None), ("sealed", KEY)):
            path = Path(folder) / kept
            earlier, later = (part_saved(path, float(save), key) for save in (1, 2))
            file = path.with_name(later["files"][0])
            whole, before = file.read_bytes(), path.with_name(earlier["files"][0]).read_bytes()
            if part_taken_up(path, later, key) != 2.0:
                found.append(f"lost a {kept} part")
            for what, forged in {
                "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
                "earlier": before,
            }.items():
                file.write_bytes(forged)
                if part_taken_up(path, later, key) is not None:
                    found.append(f"took up a {kept} part that was {what}")
    return refuted_by(found)


def part_saved(path: Path, value: float, key: bytes | None) -> dict[str, Any]:
    """Write a part as a rank does; returns what the checkpoint says of it."""
    name = f"{path.name}.{value:.0f}.part"
    places: list[Place] = []
    part = file_of([torch.full((ENTRIES,), value)], key, places)
    path.with_name(name).write_bytes(b"".join(part))
    boxes = [[[0], [ENTRIES], 0, places[0]]]
    return {"files": [name], "tensors": {PLACE: [[ENTRIES], torch.float32, boxes]}}


def part_taken_up(path: Path, parts: dict[str, Any], key: bytes | None) -> float | None:
    """The first entry that a run would go on with; None where it is refused."""
    memory = with_parts({"memory": None, "parts": parts}, path, key)["memory"]
    try:
        return float(memory.whole()[0])
    except ValueError:
        return None


NOISY_STEPS, DONE, SIZE, DIGEST = 12, 5, 3, "0" * 64
PAIRS: tuple[tuple[Strategy, Strategy], ...] = (
    (RedrawnToeplitz(4), RedrawnToeplitz(5)),
    (BandedToeplitz(4), BandedToeplitz(3)),
    (BufferedToeplitz(2), BufferedToeplitz(2, scaled=True)),
)


def resumed_noise() -> str:
    """Save and resume gates under one strategy, and under another.

    A strategy is fitted again where a run is resumed. Fitted otherwise (by another version of a
    library, say), the noise to come does not take back what was released, and how far a record
    moves the whole has no bound that anybody computed.
    """
    found = []
    for first, second in PAIRS:
        for strategy in (first, second):
            if noise_taken_up(first, strategy) != (strategy == first):
                said = "lost" if strategy == first else "took up"
                found.append(f"{said} the noise of {type(first).__name__}")
    return refuted_by(found)


def noise_taken_up(first: Strategy, second: Strategy) -> bool:
    """Whether a gate with the second strategy goes on with what one with the first saved."""
    with Ledger(neighboring="zero-out") as ledger:
        gate = gate_of(first, ledger)
        for _ in range(DONE):
            gate.release_sum([torch.zeros(SIZE, dtype=torch.float64)])
        gate.note_checkpoint(DIGEST)
        try:
            gate_of(second, ledger, gate)
        except ValueError:
            return False
        return True


def gate_of(strategy: Strategy, ledger: Ledger, earlier: Gate | None = None) -> Gate:
    """Return the gate of a run with this strategy; one that goes on where ``earlier`` is."""
    query = CorrelatedSum(1.0, 1.0, strategy, NOISY_STEPS)
    return Gate(
        event=query.event,
        neighboring="zero-out",
        query=query,
        releases=NOISY_STEPS,
        ledger=ledger,
        noise=KeyStream.from_seed(len(str(strategy)), "resumed noise"),
        label="audit",
        resume=None if earlier is None else earlier.secret_state(),
        checkpoint=DIGEST,
    )
