"""The paper's settings and bounds: their numbers, their limits, and that runs stay below the
bound.
"""

import math

import numpy as np
import pytest

from dpoptim.noise.correlated import BinaryTree
from dpoptim.theory import accelerated_srgd as theory


def test_eq_19() -> None:
    n, p, epsilon, delta = 10**6, 100, 0.5, 1e-7
    found = theory.minimiser_inside(n, p, epsilon, delta, lipschitz=2.0, radius=3.0)
    c = (
        4
        * math.sqrt(2)
        * math.log2(n) ** 1.5
        * math.sqrt(math.log(2 * n / delta))
        * math.log(2.5 / delta)
    )
    assert theory.c_dp(n, delta) == pytest.approx(c)
    assert found.steps == pytest.approx(c * n**0.25)
    assert found.steps * found.batch_size == pytest.approx(n)
    assert found.beta == pytest.approx(c**2 * 2.0 / 3.0)  # sqrt(p) / (epsilon sqrt(n)) is below 1
    assert found.clip_norm == pytest.approx(2 * c)
    assert not found.feasible
    assert theory.minimiser_inside(10**9, p, epsilon, 1e-10, lipschitz=1.0, radius=1.0).feasible


def test_theorem_5_12_keeps_its_own_conditions() -> None:
    for n in (100, 10**4, 10**8):
        for batch in (None, n**0.25):
            found = theory.minimiser_anywhere(
                n, lipschitz=1.0, smoothness=2.0, radius=0.5, batch_size=batch
            )
            assert found.beta >= 2 * 2.0 * found.steps  # Lemma 5.9 asks for beta >= 2 M T
            assert found.batch_size <= math.sqrt(n) * (1 + 1e-12)
    with pytest.raises(ValueError, match="at most sqrt"):
        theory.minimiser_anywhere(100, lipschitz=1.0, smoothness=1.0, radius=1.0, batch_size=11)


def test_corollary_5_7_prints_too_little_noise() -> None:
    """Units of C / (epsilon B beta): what Lemma 5.6's tree needs at the stated mu, against what is
    printed.
    """
    delta = 1e-6
    for steps in (4, 64, 1000, 2**16):
        printed = math.sqrt(math.log2(steps) * math.log(2.5 / delta))
        needed = math.sqrt(1 + math.ceil(math.log2(steps))) * math.sqrt(2 * math.log(2.5 / delta))
        assert needed > math.sqrt(2) * printed
        assert BinaryTree().sensitivity(steps) <= math.sqrt(1 + math.ceil(math.log2(steps))) * (
            1 + 1e-11
        )


def bound(**changed: object) -> float:
    arguments = {
        "batch_size": 100,
        "beta": 2.0,
        "deviation": 1.0,
        "radius": 1.5,
        "gradient_norms": [1.0] * 10,
        "noise_norms": [0.1] * 10,
        "failure": 0.01,
    }
    return theory.excess_risk_bound(**(arguments | changed))  # type: ignore[arg-type]


def test_theorem_5_1_in_its_limits() -> None:
    zeros = [0.0] * 10
    assert bound(deviation=0.0, noise_norms=zeros) == pytest.approx(2.0 * 1.5**2 / 55)
    assert bound(noise_norms=zeros) < bound() < bound(noise_norms=[0.2] * 10)
    assert bound(batch_size=10**12, noise_norms=zeros) == pytest.approx(2.0 * 1.5**2 / 55, rel=1e-3)
    with pytest.raises(ValueError, match="one length"):
        bound(noise_norms=[])
    with pytest.raises(ValueError, match="empty"):
        theory.independent_excess_risk_bound(
            batch_size=1, beta=1, lipschitz=1, radius=1, noise_norms=[]
        )
    exact = theory.independent_excess_risk_bound(
        batch_size=1e20, beta=2, lipschitz=1, radius=1.5, noise_norms=zeros
    )
    assert exact == pytest.approx(2.0 * 1.5**2 / 55)


@pytest.mark.parametrize("curvature", [1e-6, 1e-4, 0.01, 0.3, 1.0])
def test_exact_gradients_stay_below_theorem_5_1(curvature: float) -> None:
    """Algorithm 1 on curvature x^2 / 2 and on Huber losses, from distance R = 1, with beta = M =
    1.
    """
    for gradient, loss in (
        (lambda x: curvature * x, lambda x: curvature * x * x / 2),
        (
            lambda x: np.clip(x, -curvature, curvature),
            lambda x: x * x / 2 if abs(x) < curvature else curvature * abs(x) - curvature**2 / 2,
        ),
    ):
        x = z = 1.0
        for t in range(200):
            g = gradient(x)
            z, y = z - (t + 1) * g, x - g
            x = (1 - 2 / (t + 3)) * y + 2 / (t + 3) * z
            zeros = [0.0] * (t + 1)
            limit = theory.excess_risk_bound(
                batch_size=1,
                beta=1,
                deviation=0,
                radius=1,
                gradient_norms=zeros,
                noise_norms=zeros,
                failure=0.5,
            )
            assert loss(y) <= limit


def test_optimal_rate() -> None:
    assert theory.optimal_rate(10**4, 100, 0.5) == pytest.approx(0.01 + 10 / 5000)
