"""Correlated noise taken up by a strategy fitted to other numbers: to be refused.

A strategy is fitted again where a run is resumed. Fitted otherwise (by another version of a
library, say), the noise to come does not take back what was released, and how far a record moves
the whole has no bound that anybody computed.
"""

import torch

from dpoptim.accounting.ledger import Ledger
from dpoptim.gate import CorrelatedSum, Gate
from dpoptim.noise.correlated import BandedToeplitz, BufferedToeplitz, RedrawnToeplitz, Strategy
from dpoptim.noise.stream import KeyStream

STEPS, DONE, SIZE, DIGEST = 12, 5, 3, "0" * 64
PAIRS: tuple[tuple[Strategy, Strategy], ...] = (
    (RedrawnToeplitz(4), RedrawnToeplitz(5)),
    (BandedToeplitz(4), BandedToeplitz(3)),
    (BufferedToeplitz(2), BufferedToeplitz(2, scaled=True)),
)


def resumed_noise() -> str:
    """Save and resume gates under one strategy, and under another."""
    found = []
    for first, second in PAIRS:
        for strategy in (first, second):
            if taken_up(first, strategy) != (strategy == first):
                said = "lost" if strategy == first else "took up"
                found.append(f"{said} the noise of {type(first).__name__}")
    return f"refuted: {'; '.join(found)}" if found else ""


def taken_up(first: Strategy, second: Strategy) -> bool:
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
    query = CorrelatedSum(1.0, 1.0, strategy, STEPS)
    return Gate(
        event=query.event,
        neighboring="zero-out",
        query=query,
        releases=STEPS,
        ledger=ledger,
        noise=KeyStream.from_seed(len(str(strategy)), "resumed noise"),
        label="audit",
        resume=None if earlier is None else earlier.secret_state(),
        checkpoint=DIGEST,
    )
