"""One record against correlated noise: audited through the gate, never above what is charged and
close to it.
"""

import dp_accounting
import numpy as np
import pytest
import torch

from dpoptim.accounting.ledger import Ledger
from dpoptim.audit.bounds import Errors, gdp_lower_bound
from dpoptim.errors import PrivacyError
from dpoptim.gate import CorrelatedSum, Gate
from dpoptim.noise.correlated import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    Strategy,
    ToeplitzSquareRoot,
)
from dpoptim.noise.few_rows import FewRows
from dpoptim.noise.stream import KeyStream

MU, STEPS, BOUND, TRIALS = 2.0, 6, 3.0, 40_000
MECHANISMS = [
    Independent(),
    BinaryTree(),
    BinaryTree("honaker"),
    BufferedToeplitz(3),
    ToeplitzSquareRoot(),
    ToeplitzSquareRoot(normalised=True),
]


def gate(
    mechanism: Strategy, seed: int, participations: int = 1, separation: int | None = None
) -> Gate:
    query = CorrelatedSum(BOUND, 1 / MU, mechanism, STEPS, participations, separation)
    return Gate(
        event=dp_accounting.GaussianDpEvent(1 / MU),
        neighboring="zero-out",
        query=query,
        releases=STEPS,
        ledger=Ledger(neighboring="zero-out"),
        noise=KeyStream.from_seed(seed, "noise"),
        label="audit",
    )


def releases(of: Gate, shift: np.ndarray) -> np.ndarray:
    """Each of the TRIALS entries is a run of its own, in one dimension: what the steps release,
    shape (STEPS, TRIALS).
    """
    return np.stack(
        [
            of.release_sum([torch.full((TRIALS,), BOUND * s, dtype=torch.float64)])[0].numpy()
            for s in shift
        ]
    )


def test_tables_by_rows_are_refused() -> None:
    """Only independent noise is written over them."""
    value = torch.ones(1, 2, dtype=torch.float64)
    few = FewRows(torch.zeros(6, dtype=torch.float64), 0, torch.tensor([1]), value)
    with pytest.raises(TypeError, match="independent noise only"):
        gate(BinaryTree(), 1).release_sum([few])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("pattern", [(0,), (0, 3)], ids=str)
def test_the_best_attack_finds_what_is_charged_and_no_more(
    mechanism: Strategy, pattern: tuple[int, ...]
) -> None:
    """The likelihood ratio, with the covariance measured on other draws. Wrong with probability
    below 1e-6.
    """
    shift = np.zeros(STEPS)
    shift[list(pattern)] = 1.0
    k, b = len(pattern), 3 if len(pattern) > 1 else None
    measured = np.cov(releases(gate(mechanism, 1, k, b), np.zeros(STEPS)))
    direction = np.linalg.solve(measured, shift)
    absent = direction @ releases(gate(mechanism, 2, k, b), np.zeros(STEPS))
    present = direction @ releases(gate(mechanism, 3, k, b), shift)
    threshold = BOUND * float(direction @ shift) / 2
    errors = Errors(
        int(np.sum(absent > threshold)), TRIALS, int(np.sum(present <= threshold)), TRIALS
    )
    found = gdp_lower_bound(errors, confidence=1 - 1e-6)
    assert found <= MU
    # The nodes of Honaker's estimate say more together than what is released, and several
    # participations or steps that are not the worst ones cost less than is charged.
    loose = mechanism == BinaryTree("honaker") or (
        k > 1 and mechanism == ToeplitzSquareRoot(normalised=True)
    )
    not_the_worst = k > 1 and mechanism == BinaryTree()
    assert found >= (0.6 if loose else 0.85 if not_the_worst else 0.9) * MU


def test_noise_for_the_wrong_matrix_is_caught() -> None:
    """C^-1 z on the prefix sums instead of on the increments: the mistake that claims mu = 2 and
    gives far more.
    """
    mechanism = ToeplitzSquareRoot()
    noise = gate(mechanism, 4)
    # prefix sums of these are C^-1 z
    wrong = np.diff(releases(noise, np.zeros(STEPS)), axis=0, prepend=0.0)
    shift = np.eye(STEPS)[0]
    direction = np.linalg.solve(np.cov(wrong), shift)
    absent, present = (
        direction @ wrong[:, ::2],
        direction @ (wrong[:, 1::2] + BOUND * shift[:, None]),
    )
    threshold = BOUND * float(direction @ shift) / 2
    half = TRIALS // 2
    errors = Errors(int(np.sum(absent > threshold)), half, int(np.sum(present <= threshold)), half)
    assert gdp_lower_bound(errors, confidence=1 - 1e-6) > 1.5 * MU


def test_the_gate_stops_with_the_noise() -> None:
    one = gate(BinaryTree(), 5)
    for _ in range(STEPS):
        one.release_sum([torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(PrivacyError, match="have been released"):
        one.release_sum([torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(ValueError, match="releases=7"):
        Gate(
            event=dp_accounting.GaussianDpEvent(1.0),
            neighboring="zero-out",
            query=CorrelatedSum(1.0, 1.0, BinaryTree(), STEPS),
            releases=STEPS + 1,
            ledger=Ledger(neighboring="zero-out"),
            noise=KeyStream(),
            label="too long",
        )


def test_adaptive_inputs_do_not_change_the_noise() -> None:
    """What is released less what came in is the same whatever came in: the noise looks at no
    data.
    """
    for mechanism in MECHANISMS:
        quiet, loud = gate(mechanism, 6), gate(mechanism, 6)
        total = torch.zeros(4, dtype=torch.float64)
        for _ in range(STEPS):
            plain = quiet.release_sum([torch.zeros(4, dtype=torch.float64)])[0]
            given = total.sign() + 1
            total = loud.release_sum([given.clone()])[0]
            torch.testing.assert_close(total - given, plain, rtol=0, atol=1e-12)
