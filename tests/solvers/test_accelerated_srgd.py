"""Accelerated-DP-SRGD against a transcription of Algorithm 1, against Nesterov's method, and its
settings.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dpoptim.accounting.gaussian import gdp_epsilon, gdp_mu
from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.noise.correlated import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    Strategy,
    ToeplitzSquareRoot,
)
from dpoptim.solvers.accelerated_srgd import SRGDResult, accelerated_srgd, batches_in_order
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.constraints import Ball, Box, Constraint, Everywhere
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.problem import LinearProblem, ModuleProblem
from dpoptim.solvers.srgd_settings import SRGD, suggested_settings, theorem_settings

STEPS, BATCH, FEATURES = 6, 20, 3


def made_up(n: int = STEPS * BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FEATURES))
    y = (rng.random(n) < 1 / (1 + np.exp(-x @ [2.0, -1.0, 0.5]))).astype(float)
    return torch.from_numpy(x), torch.from_numpy(y)


def logistic(l2: float = 0.0, capacity: int = 10**4) -> LinearProblem:
    return LinearProblem(
        LinearModel("logistic", FEATURES, intercept=False), capacity=capacity, l2=l2
    )


def gradient(w: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """As the clipped sum has it: every record is scaled by 1 - 2^-22, whatever the bound, for
    rounding's sake.
    """
    return (1 - 2.0**-22) * x.numpy().T @ (1 / (1 + np.exp(-x.numpy() @ w)) - y.numpy()) / len(x)


def algorithm_1(
    x: torch.Tensor,
    y: torch.Tensor,
    beta: float,
    *,
    recursive: bool,
    accelerated: bool,
    radius: float = math.inf,
) -> np.ndarray:
    """Line by line, with eta_t = t + 1 and tau_t = eta_t / sum of etas."""

    def project(w: np.ndarray) -> np.ndarray:
        return w * min(1.0, radius / max(np.linalg.norm(w), 1e-300))

    eta = np.arange(1.0, STEPS + 2)
    xs, z, y_next, deltas = [np.zeros(FEATURES)], np.zeros(FEATURES), np.zeros(FEATURES), []
    for t in range(STEPS):
        batch = slice(t * BATCH, (t + 1) * BATCH)
        delta = eta[t] * gradient(xs[t], x[batch], y[batch])
        if t > 0 and recursive:
            delta -= eta[t - 1] * gradient(xs[t - 1], x[batch], y[batch])
        deltas.append(delta)
        estimate = sum(deltas) / eta[t] if recursive else delta / eta[t]
        z = project(z - eta[t] / beta * estimate)
        y_next = project(xs[t] - estimate / beta)
        tau = eta[t + 1] / np.sum(eta[: t + 2])
        xs.append((1 - tau) * y_next + tau * z if accelerated else y_next)
    return y_next


@pytest.mark.parametrize("recursive", [True, False])
@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("radius", [math.inf, 0.5])
def test_without_noise_it_is_algorithm_1(recursive: bool, accelerated: bool, radius: float) -> None:
    x, y = made_up()
    settings = SRGD(
        STEPS,
        BATCH,
        clip_norm=1e4,
        beta=0.7,
        gradient="recursive" if recursive else "independent",
        accelerated=accelerated,
        constraint=Everywhere() if radius == math.inf else Ball(radius),
    )
    found = accelerated_srgd(logistic(), (x, y), settings, budget=None).weights
    expected = algorithm_1(x, y, 0.7, recursive=recursive, accelerated=accelerated, radius=radius)
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_on_full_batches_it_is_nesterovs_method() -> None:
    """In two sequences, with the third eliminated: recursive gradients telescope to the exact
    ones.
    """
    x, y = made_up(50)
    steps, beta = 30, 1.3
    settings = SRGD(steps, 50, clip_norm=1e6, beta=beta)
    found = accelerated_srgd(
        logistic(), (x.repeat(steps, 1), y.repeat(steps)), settings, budget=None
    ).weights
    point, previous = np.zeros(FEATURES), np.zeros(FEATURES)
    for t in range(steps):
        g = gradient(point, x, y)
        current = point - g / beta
        tau, tau_next = 2 / (t + 2), 2 / (t + 3)
        z = (point - (1 - tau) * previous) / tau - (t + 1) * g / beta
        point, previous = (1 - tau_next) * current + tau_next * z, current
    np.testing.assert_allclose(found, previous, atol=1e-10)


def test_acceleration_is_faster_on_a_badly_conditioned_problem() -> None:
    x = torch.diag(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)) * math.sqrt(3)
    y = x @ torch.ones(3, dtype=torch.float64)
    problem = LinearProblem(LinearModel("squared", 3, intercept=False), capacity=3)
    errors = {}
    for accelerated in (True, False):
        settings = SRGD(60, 3, clip_norm=1e6, beta=1.0, accelerated=accelerated)
        w = accelerated_srgd(
            problem, (x.repeat(60, 1), y.repeat(60)), settings, budget=None
        ).weights
        errors[accelerated] = float((x @ w - y).square().mean())
    assert errors[True] < errors[False] / 5


def test_any_module_will_do() -> None:
    """A network's clipped differences of gradients come from the recorder; here a network that is
    a linear model.
    """
    x, y = made_up()
    module = torch.nn.Linear(FEATURES, 1, bias=False).double()
    torch.nn.init.zeros_(module.weight)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(
            output[:, 0], target, reduction="none"
        )

    settings = SRGD(STEPS, BATCH, clip_norm=1.5, beta=1.0)
    found = [
        accelerated_srgd(
            problem, (x, y), settings, budget=Budget(1e-5, mu=5.0), noise_seed=2
        ).weights
        for problem in (ModuleProblem(module, loss, capacity=BATCH), logistic())
    ]
    np.testing.assert_allclose(*found, atol=1e-5)  # the two leave different margins for rounding


def test_the_public_penalty_is_exact() -> None:
    x, y = made_up()
    settings = SRGD(STEPS, BATCH, clip_norm=1e4, beta=1.0)
    l2 = 0.3
    found = accelerated_srgd(logistic(l2), (x, y), settings, budget=None).weights
    w, z, estimate, previous = (
        np.zeros(FEATURES),
        np.zeros(FEATURES),
        np.zeros(FEATURES),
        np.zeros(FEATURES),
    )
    for t in range(STEPS):
        batch = slice(t * BATCH, (t + 1) * BATCH)
        estimate = estimate + (t + 1) * gradient(w, x[batch], y[batch])
        estimate -= t * gradient(previous, x[batch], y[batch])
        weighted = estimate + (t + 1) * l2 * w
        z = z - weighted
        previous, y_next = w, w - weighted / (t + 1)
        w = (1 - 2 / (t + 3)) * y_next + 2 / (t + 3) * z
    np.testing.assert_allclose(found, y_next, atol=1e-13)


@pytest.mark.parametrize(
    "mechanism",
    [None, BinaryTree("honaker"), ToeplitzSquareRoot(), ToeplitzSquareRoot(True)],
    ids=repr,
)
def test_the_noise_of_the_prefix_sums(mechanism: Strategy | None) -> None:
    """No gradients, 20,000 parameters: the estimates are bare noise with the standard deviation of
    the mechanism.
    """
    problem = Nothing(20_000)
    settings = SRGD(8, 5, clip_norm=3.0, beta=1.0, mechanism=mechanism)
    result = accelerated_srgd(
        problem, (torch.zeros(40),), settings, budget=Budget(1e-5, mu=2.0), noise_seed=1
    )
    expected = 3.0 / (2.0 * 5) * (mechanism or BufferedToeplitz()).prefix_std(8)
    found = np.array(result.gradient_norms) * np.arange(1, 9) / math.sqrt(problem.dimension)
    np.testing.assert_allclose(found, expected, rtol=6 / math.sqrt(2 * problem.dimension))


def test_the_noise_of_independent_gradients() -> None:
    problem = Nothing(20_000)
    settings = SRGD(8, 5, clip_norm=3.0, beta=1.0, gradient="independent")
    for relation, factor in (("zero-out", 1.0), ("replace-one", 2.0)):
        result = accelerated_srgd(
            problem,
            (torch.zeros(40),),
            settings,
            budget=Budget(1e-5, rho=2.0),
            neighboring=relation,
            noise_seed=1,
        )
        found = np.array(result.gradient_norms) / math.sqrt(problem.dimension)
        np.testing.assert_allclose(
            found, factor * 3.0 / (2.0 * 5), rtol=6 / math.sqrt(2 * problem.dimension)
        )


class Nothing:
    """A problem whose records have no gradient."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def initial(self) -> torch.Tensor:
        return torch.zeros(self.dimension, dtype=torch.float64)

    def prepare(self, records: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return records[0]

    def clipped_sum(self, batch: torch.Tensor, terms: object, bound: float) -> torch.Tensor:
        return self.initial()

    def total_loss(self, batch: torch.Tensor, w: torch.Tensor) -> float:
        return 0.0

    def penalty(self, w: torch.Tensor) -> float:
        return 0.0

    def penalty_gradient(self, w: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(w)


def run(**changed: object) -> SRGDResult:
    arguments: dict[str, object] = {"budget": Budget(1e-5, epsilon=1.0)} | changed
    return accelerated_srgd(logistic(), made_up(), SRGD(STEPS, BATCH, 2.0, 1.0), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_the_budget_is_what_is_charged_once(relation: str) -> None:
    ledger = Ledger(neighboring=relation)
    result = run(neighboring=relation, ledger=ledger)
    assert result.guarantee.status == "proven"
    assert 0.999 < result.guarantee.epsilon <= 1.0 + 1e-9
    (entry,) = ledger.entries()
    assert entry.state == "committed"
    m = 2.0 if relation == "replace-one" else 1.0
    assert entry.event.noise_multiplier == pytest.approx(m / gdp_mu(1.0, 1e-5))


def test_budgets_in_all_currencies_agree() -> None:
    mu = 0.7
    epsilon = gdp_epsilon(mu, 1e-5)
    found = [
        run(budget=Budget(1e-5, **b)).guarantee.epsilon
        for b in ({"mu": mu}, {"rho": mu**2 / 2}, {"epsilon": epsilon})
    ]
    np.testing.assert_allclose(found, epsilon, rtol=1e-6)


def test_what_is_not_private_says_so() -> None:
    assert "no privacy" in str(run(budget=None).guarantee)
    assert "not for release" in str(run(noise_seed=1).guarantee)
    assert torch.equal(run(noise_seed=1).weights, run(noise_seed=1).weights)
    assert not torch.equal(run().weights, run().weights)


def test_a_refusal_comes_before_the_data_is_read() -> None:
    def records() -> Iterator[tuple[torch.Tensor, float]]:
        raise AssertionError("the data was read")
        yield

    with pytest.raises(BudgetExceeded):
        accelerated_srgd(
            logistic(),
            records(),
            SRGD(STEPS, BATCH, 2.0, 1.0),
            budget=Budget(1e-5, epsilon=1.0),
            ledger=Ledger(neighboring="zero-out", epsilon=0.5, delta=1e-5),
        )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="another batch"):
        run(neighboring="add-or-remove-one")
    with pytest.raises(ValueError, match="capacity=20"):
        accelerated_srgd(
            logistic(capacity=19), made_up(), SRGD(STEPS, BATCH, 2.0, 1.0), budget=None
        )
    for name, value in {
        "steps": 0,
        "batch_size": 2.5,
        "clip_norm": math.inf,
        "beta": 0.0,
        "gradient": "none",
    }.items():
        with pytest.raises(ValueError, match=name):
            SRGD(**({"steps": 2, "batch_size": 2, "clip_norm": 1.0, "beta": 1.0} | {name: value}))  # type: ignore[arg-type]


def test_streams() -> None:
    x, y = made_up()
    arrays = [[tuple(c) for c in b] for b in batches_in_order((x, y), BATCH, STEPS)]
    records = iter(list(zip(x, y, strict=True)) + [None] * 3)
    stream = [[tuple(c) for c in b] for b in batches_in_order(records, BATCH, STEPS)]
    assert next(records) is None  # read no further than needed
    for a, b in zip(arrays, stream, strict=True):
        assert len(a) == len(b) == 1
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)
    assert (
        sum(len(c[0]) for b in batches_in_order((torch.zeros(20_000),), 10_000, 2) for c in b)
        == 20_000
    )
    with pytest.raises(ValueError, match="has 120 records, but 7 batches"):
        batches_in_order((x, y), BATCH, STEPS + 1)
    with pytest.raises(ValueError, match="ended early"):
        [list(b) for b in batches_in_order(iter([(1.0,)] * 3), 2, 2)]
    with pytest.raises(ValueError, match="one length"):
        batches_in_order((x, y[1:]), BATCH, STEPS)


@pytest.mark.parametrize("constraint", [Ball(0.3), Box(-0.2, 0.1)], ids=repr)
def test_iterates_stay_in_the_set(constraint: Constraint) -> None:
    x, y = made_up()
    settings = SRGD(STEPS, BATCH, 2.0, 0.1, constraint=constraint)
    result = accelerated_srgd(
        logistic(), (x, y), settings, budget=Budget(1e-5, mu=0.1), noise_seed=0
    )
    for w in (result.weights, result.average):
        torch.testing.assert_close(constraint.project(w), w, rtol=0, atol=1e-12)


def test_projections() -> None:
    w = torch.tensor([3.0, -4.0], dtype=torch.float64)
    torch.testing.assert_close(Ball(1.0).project(w), w / 5)
    assert Ball(6.0).project(w) is w
    torch.testing.assert_close(
        Box(-1, 2).project(w), torch.tensor([2.0, -1.0], dtype=torch.float64)
    )
    for wrong in (lambda: Ball(0.0), lambda: Box(1, -1)):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_suggested_settings_learn_and_theorems_settings_are_theirs() -> None:
    n = 20_000
    x, y = made_up(n)
    x = x / x.norm(dim=1, keepdim=True)
    mu = gdp_mu(1.0, 1e-6)
    for inside in (True, False):
        settings = suggested_settings(
            n, FEATURES, mu, smoothness=0.25, radius=3.0, minimiser_inside=inside
        )
        assert settings.steps * settings.batch_size <= n
        result = accelerated_srgd(
            logistic(), (x, y), settings, budget=Budget(1e-6, mu=mu), noise_seed=0
        )
        loss = logistic().total_loss(logistic().prepare((x, y)), result.weights) / n
        assert loss < math.log(2) - 0.03
    with pytest.raises(ValueError, match="too small for Eq. 19"):
        theorem_settings(
            n, 3, 1.0, 1e-6, lipschitz=1, smoothness=1, radius=1, minimiser_inside=True
        )
    settings = theorem_settings(
        n, 3, 1.0, 1e-6, lipschitz=1, smoothness=1, radius=1, minimiser_inside=False
    )
    assert (settings.steps, settings.batch_size) == (142, 140)
    assert settings.clip_norm == 12
    assert settings.beta == pytest.approx(24 * math.sqrt(n))
    assert isinstance(settings.noise, BinaryTree)
    assert isinstance(SRGD(1, 1, 1, 1, gradient="independent").noise, Independent)
