"""Mechanisms for prefix sums: their errors against the published table, their noise against their
matrices.
"""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch

from dpoptim.noise.correlated import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    RedrawnToeplitz,
    Strategy,
    ToeplitzSquareRoot,
)
from dpoptim.noise.correlated.buffered_toeplitz import (
    coefficients,
    fitted,
    unit_response,
)
from dpoptim.noise.correlated.toeplitz import inverse_coefficients, square_root_coefficients
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Workload
from dpoptim.noise.stream import KeyStream

MECHANISMS: list[Strategy] = [
    Independent(),
    BinaryTree(),
    BinaryTree("honaker"),
    BufferedToeplitz(2, separation=4),
    BufferedToeplitz(3),
    BufferedToeplitz(3, scaled=True),
    BufferedToeplitz(2, True, 3),
    BufferedToeplitz(2, True, 3, Workload(0.5, "cosine")),
    RedrawnToeplitz(3),
    RedrawnToeplitz(4, 3),
    RedrawnToeplitz(2, 5, Workload(0.5, "cosine")),
    ToeplitzSquareRoot(),
    ToeplitzSquareRoot(normalised=True),
]
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)


def toeplitz(column: np.ndarray) -> np.ndarray:
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def strategy(mechanism: Strategy, steps: int) -> np.ndarray:
    """C, written down from its definition; one row for each noise variable, one column for each
    step.
    """
    if isinstance(mechanism, Independent):
        return np.eye(steps)
    # the plain estimate never shows the noisy sum of a right node
    if mechanism == BinaryTree():
        return np.array(
            [
                [float(start <= step < start + (1 << height)) for step in range(steps)]
                for height in range(steps.bit_length())
                for start in range(0, steps - (1 << height) + 1, 2 << height)
            ]
        )
    if isinstance(mechanism, BinaryTree):
        return np.linalg.cholesky(np.linalg.inv(honakers_covariance(steps))).T
    if isinstance(mechanism, BufferedToeplitz):
        weights, decays, rows = mechanism.parameters(steps)
        plain = toeplitz(
            np.array([1.0, *(float(np.sum(weights * decays**k)) for k in range(steps - 1))])
        )
        return np.sqrt(rows)[:, None] * plain
    if isinstance(mechanism, RedrawnToeplitz):
        response, rows = mechanism.parameters(steps)
        inverse = toeplitz(np.concatenate([response, np.zeros(steps - len(response))]))
        return np.linalg.inv(inverse / np.sqrt(rows))
    square_root = toeplitz(square_root_coefficients(steps))
    return (
        square_root / np.linalg.norm(square_root, axis=0) if mechanism.normalised else square_root
    )


def honakers_covariance(steps: int) -> np.ndarray:
    """Of the increments of Honaker's prefix sums, each node a variable: from his recursion."""
    size = 1 << steps.bit_length()

    def estimate(start: int, height: int) -> np.ndarray:
        own = np.zeros((steps.bit_length() + 1, size))
        own[height, start >> height] = 1
        if height == 0:
            return own.ravel()
        weight = 2.0**height / (2.0 ** (height + 1) - 1)
        halves = estimate(start, height - 1) + estimate(start + (1 << height - 1), height - 1)
        return weight * own.ravel() + (1 - weight) * halves

    prefixes = [np.zeros((steps.bit_length() + 1) * size)]
    for end in range(1, steps + 1):
        start, total = 0, 0.0
        for height in reversed(range(end.bit_length())):
            if end >> height & 1:
                total = total + estimate(start, height)
                start += 1 << height
        prefixes.append(total)
    rows = np.diff(prefixes, axis=0)
    return rows @ rows.T


def increments(mechanism: Strategy, steps: int, size: int, seed: int) -> torch.Tensor:
    """What the mechanism adds to zeros, step by step: shape (steps, size)."""
    state = mechanism.start(steps, [size], KeyStream.from_seed(seed, "noise"))
    out = torch.zeros(steps, size, dtype=torch.float64)
    for row in out:
        state.add([row], 1.0)
    return out


def iterates(mechanism: Strategy, noise: torch.Tensor) -> np.ndarray:
    """What the optimizer of the mechanism's workload makes of noise, by its own loop."""
    position = torch.zeros(noise.shape[1], requires_grad=True, dtype=torch.float64)
    optimizer = torch.optim.SGD([position], lr=1.0, momentum=mechanism.workload.momentum)
    found, rates = [], mechanism.workload.rates(len(noise))
    for row, rate in zip(noise, rates, strict=True):
        optimizer.param_groups[0]["lr"] = -rate * (1 - mechanism.workload.momentum)
        position.grad = row
        optimizer.step()
        found.append(position.detach().clone())
    return torch.stack(found).numpy()


@pytest.mark.parametrize(
    ("mechanism", "errors"),
    [
        (Independent(), (8.00, 5.70, 32.0, 22.6)),
        (BinaryTree(), (6.48, 4.59, 10.49, 7.42)),
        (BinaryTree("honaker"), (4.81, 3.41, 7.41, 5.24)),  # 5.15 if every node is charged
        (BufferedToeplitz(3), (2.39, 2.23, 3.28, 3.11)),
        (ToeplitzSquareRoot(), (2.39, 2.23, 3.27, 3.11)),
        (ToeplitzSquareRoot(normalised=True), (2.21, 2.13, 3.08, 2.99)),
    ],
    ids=repr,
)
def test_errors_of_prefix_sums_are_the_known_ones(
    mechanism: Strategy, errors: tuple[float, ...]
) -> None:
    short, long = mechanism.prefix_std(64), mechanism.prefix_std(1024)
    found = (short.max(), np.sqrt(np.mean(short**2)), long.max(), np.sqrt(np.mean(long**2)))
    np.testing.assert_allclose(found, errors, rtol=0.01)


@every_mechanism
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 13])
@pytest.mark.thinned(3)
def test_streamed_noise_has_the_variance_it_says(mechanism: Strategy, steps: int) -> None:
    """Chi-square with 40,000 degrees of freedom at each step; 6 standard deviations, so false
    alarms below 1e-6.
    """
    size = 40_000
    noise = iterates(mechanism, increments(mechanism, steps, size, seed=7))
    noise *= mechanism.sensitivity(steps)
    variance = np.mean(noise**2, axis=1) / mechanism.prefix_std(steps) ** 2
    assert np.all(np.abs(variance - 1) < 6 * np.sqrt(2 / size))


@every_mechanism
def test_the_strategy_undoes_the_noise(mechanism: Strategy) -> None:
    """C times the streamed increments is white."""
    steps, size = 12, 40_000
    noise = increments(mechanism, steps, size, seed=3).numpy()
    white = strategy(mechanism, steps) @ noise
    assert np.abs(np.cov(white) - np.eye(steps)).max() < 6 * np.sqrt(2 / size)


@every_mechanism
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 11])
@pytest.mark.thinned(2)
def test_sensitivity_against_all_patterns(mechanism: Strategy, steps: int) -> None:
    """Never below the worst pattern; equal to it where that is promised."""
    gram = strategy(mechanism, steps).T @ strategy(mechanism, steps)
    for participations in range(1, 5):
        for separation in range(1, 5):
            worst = 0.0
            for k in range(1, min(participations, steps) + 1):
                for pattern in itertools.combinations(range(steps), k):
                    if np.all(np.diff(pattern) >= separation):
                        worst = max(worst, float(np.sum(np.abs(gram[np.ix_(pattern, pattern)]))))
            bound = mechanism.sensitivity(steps, participations, separation)
            assert bound >= np.sqrt(worst)
            tree = isinstance(mechanism, BinaryTree)
            loose = (tree and separation > 1) or mechanism in (
                ToeplitzSquareRoot(normalised=True),
                BinaryTree("honaker"),
                BufferedToeplitz(3, scaled=True),
                BufferedToeplitz(2, True, 3),
                BufferedToeplitz(2, True, 3, Workload(0.5, "cosine")),
            )
            loose = loose or isinstance(mechanism, RedrawnToeplitz)
            if participations == 1 or not loose:
                assert bound == pytest.approx(np.sqrt(worst), rel=1e-9)
            else:
                assert bound < (1.15 if tree else 2.0) * np.sqrt(worst)
        assert mechanism.sensitivity(steps, participations) == mechanism.sensitivity(
            steps, participations, 1
        )


@every_mechanism
@pytest.mark.parametrize(("steps", "separation"), [(8, 2), (11, 3), (12, 5), (16, 4), (37, 9)])
@pytest.mark.thinned(2)
def test_what_is_charged_for_passes_is_exact(
    mechanism: Strategy, steps: int, separation: int
) -> None:
    """Every run over fixed batches: a record in every ``separation``-th step."""
    gram = strategy(mechanism, steps).T @ strategy(mechanism, steps)
    passes = -(-steps // separation)
    worst = max(
        float(gram[start::separation, start::separation].sum()) for start in range(separation)
    )
    charged = mechanism.sensitivity(steps, passes, separation, regular=True)
    assert np.sqrt(worst) <= charged == pytest.approx(np.sqrt(worst), rel=1e-9)
    # fewer passes than there is room for: never less than any of them shows
    for start in range(separation):
        part = gram[start::separation, start::separation][: passes - 1, : passes - 1]
        fewer = mechanism.sensitivity(steps, passes - 1, separation, regular=True)
        assert np.sqrt(part.sum()) <= fewer * (1 + 1e-9)


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
@pytest.mark.parametrize(("steps", "separation"), [(1, 3), (2, None), (50, 9), (3000, None)])
def test_buffered_coefficients_are_right_and_decreasing(
    buffers: int, steps: int, separation: int | None
) -> None:
    weights, decays = fitted(buffers, steps, separation, PREFIX_SUMS)
    column = coefficients(weights, decays, steps)
    assert len(column) == steps
    assert np.all(column >= 0)
    assert np.all(np.diff(column) <= 0)
    response = unit_response(weights, decays, steps)
    product = np.convolve(column, response)[:steps]
    np.testing.assert_allclose(product, np.eye(1, steps)[0], atol=1e-9)


def test_inverse_coefficients_invert() -> None:
    product = np.convolve(square_root_coefficients(500), inverse_coefficients(500))[:500]
    np.testing.assert_allclose(product, np.eye(500)[0], atol=1e-14)


def test_three_buffers_are_near_the_square_root_for_long_runs() -> None:
    for steps in (1, 2, 3, 10, 100, 5000):
        assert (
            BufferedToeplitz(3).prefix_std(steps).max()
            < 1.02 * ToeplitzSquareRoot().prefix_std(steps).max()
        )


@every_mechanism
def test_memory(mechanism: Strategy) -> None:
    steps = 40
    state = mechanism.start(steps, [3, 5], KeyStream())
    most = 0
    for _ in range(steps):
        state.add([torch.zeros(3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)], 1.0)
        most = max(most, *(len(vectors) for vectors in state._vectors))
    allowed = {Independent: 0, BinaryTree: steps.bit_length(), ToeplitzSquareRoot: steps}
    assert most <= allowed.get(type(mechanism), getattr(mechanism, "buffers", 0))


@every_mechanism
def test_a_restored_state_goes_on(mechanism: Strategy) -> None:
    """The prefix sums' law is that of an uninterrupted run, though the draws come from another
    key.
    """
    steps, size = 9, 40_000
    first = mechanism.start(steps, [size], KeyStream.from_seed(1, "noise"))
    noise = torch.zeros(steps, size, dtype=torch.float64)
    for row in noise[:5]:
        first.add([row], 2.0)
    second = mechanism.start(steps, [size], KeyStream.from_seed(2, "noise")).restore(
        first.secret_state()
    )
    for row in noise[5:]:
        second.add([row], 2.0)
    variance = (iterates(mechanism, noise) ** 2).mean(1) / 4 * mechanism.sensitivity(steps) ** 2
    assert np.all(np.abs(variance / mechanism.prefix_std(steps) ** 2 - 1) < 6 * np.sqrt(2 / size))
    with pytest.raises(ValueError, match="over"):
        second.add([torch.zeros(size, dtype=torch.float64)], 2.0)


def test_a_secret_of_another_run_is_refused() -> None:
    state = BinaryTree().start(4, [3], KeyStream())
    state.add([torch.zeros(3, dtype=torch.float64)], 1.0)
    secret = state.secret_state()
    with pytest.raises(ValueError, match="added nothing"):
        state.restore(secret)
    with pytest.raises(ValueError, match="other tensors"):
        BinaryTree().start(4, [4], KeyStream()).restore(secret)
    with pytest.raises(ValueError, match="another length"):
        BinaryTree().start(4, [3, 3], KeyStream()).restore(secret)


@every_mechanism
def test_the_state_keeps_its_secret(mechanism: Strategy) -> None:
    state = mechanism.start(4, [2], KeyStream.from_seed(5, "noise"))
    state.add([torch.zeros(2, dtype=torch.float64)], 1.0)
    assert repr(state) == f"<{type(state).__name__}: secret noise of step 1 of 4>"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="noise of a run"):
            attempt(state)


def test_wrong_arguments_are_named() -> None:
    state = Independent().start(2, [2], KeyStream())
    good = torch.zeros(2, dtype=torch.float64)
    for buffers in (
        [good, good],
        [good[:1]],
        [good.float()],
        [torch.zeros(4, dtype=torch.float64)[::2]],
    ):
        with pytest.raises(ValueError, match="buffers"):
            state.add(buffers, 1.0)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="standard_deviation"):
            state.add([good], value)
    state.add([good], 1.0)
    with pytest.raises(ValueError, match="changed"):
        state.add([good], 2.0)
    for name, arguments in {
        "steps": (0,),
        "participations": (5, 0),
        "separation": (5, 2, 0),
    }.items():
        for mechanism in MECHANISMS:
            with pytest.raises(ValueError, match=name):
                mechanism.sensitivity(*arguments)
    with pytest.raises(ValueError, match="buffers"):
        BufferedToeplitz(5)
    with pytest.raises(ValueError, match="estimate"):
        BinaryTree("best")  # type: ignore[arg-type]


@every_mechanism
def test_several_buffers_get_independent_noise(mechanism: Strategy) -> None:
    state = mechanism.start(3, [20_000, 20_000, 0], KeyStream.from_seed(0, "noise"))
    for _ in range(3):
        a, b, nothing = (torch.zeros(n, dtype=torch.float64) for n in (20_000, 20_000, 0))
        state.add([a, b, nothing], 1.0)
        assert abs(float(np.corrcoef(a, b)[0, 1])) < 6 / np.sqrt(20_000)
