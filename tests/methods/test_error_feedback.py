"""The theorem of clipped error feedback, attacked by gradient ascent; and the memory that it is
about.
"""

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpoptim.methods.error_feedback import ErrorFeedback, norm, run_sensitivity, squared_shifts

Map = Callable[[Tensor, float], Tensor]
WORLDS, DIMENSIONS = 96, 2


def project(e: Tensor, b: float) -> Tensor:
    return e * (b / e.norm(dim=-1, keepdim=True).clamp(min=b))


def normalise(e: Tensor, b: float) -> Tensor:
    return e * (b / (e.norm(dim=-1, keepdim=True) + 0.01 * b))


def most_found(
    *,
    a: float,
    rho: float,
    b: float,
    participations: list[int],
    steps: int,
    reset_every: int | None = None,
    clip: Map = project,
    replace: bool = False,
    seed: int = 0,
) -> float:
    """The largest sum of squared shifts that gradient ascent finds, in many pairs of worlds at
    once.

    The adversary chooses what everybody else leaves in e at each step, and the record's direction
    each time it takes part (under replace-one two records'); nothing of the library but the
    theorem's own recursion is used.
    """
    generator = torch.Generator().manual_seed(seed)

    def start(*shape: int) -> Tensor:
        scale = torch.logspace(-1, 1, WORLDS, dtype=torch.float64).view(-1, *[1] * len(shape)) * (
            b + rho
        )
        x = torch.randn(WORLDS, *shape, dtype=torch.float64, generator=generator)
        return (x * scale).requires_grad_()

    others = start(steps, DIMENSIONS)
    directions = [start(len(participations), DIMENSIONS) for _ in range(1 + replace)]
    sizes = [start(len(participations), 2) for _ in range(1 + replace)]
    variables = [others, *directions, *sizes]
    optimizer = torch.optim.Adam(variables, lr=0.05 * (b + rho))
    best = 0.0
    for _ in range(150):
        e = ours = torch.zeros(WORLDS, DIMENSIONS, dtype=torch.float64)
        total = torch.zeros(WORLDS, dtype=torch.float64)
        for t in range(steps):
            if reset_every and t % reset_every == 0:
                e = ours = torch.zeros_like(e)
            p = q = torch.zeros_like(e)
            if t in participations:
                j = participations.index(t)
                for sign, direction, size in zip((1, -1), directions, sizes, strict=False):
                    u = direction[:, j] / direction[:, j].norm(dim=1, keepdim=True).clamp(min=1e-12)
                    # mostly the full length; shorter is allowed
                    length = size[:, j].clamp(max=1).add(0.9).clamp(0, 1)
                    p, q = p + sign * a * length[:, :1] * u, q + sign * rho * length[:, 1:] * u
            fed, fed_ours = clip(e, b), clip(ours, b)
            total = total + (fed_ours + p - fed).square().sum(1)
            e, ours = e - fed + others[:, t], ours - fed_ours + others[:, t] + q
        best = max(best, float(total.detach().max()))
        optimizer.zero_grad()
        (-total.clamp(min=1e-30).log().sum()).backward()
        for variable in variables:
            if variable.grad is not None:
                variable.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return best


SETTINGS = [
    # a, rho, b, participations, steps
    (1.0, 1.0, 1.0, [0], 4),
    (1.0, 1.0, 0.1, [0], 6),
    (0.5, 3.0, 0.4, [1], 5),
    (1.0, 0.3, 2.0, [0, 1], 3),
    (1.0, 1.0, 1.0, [0, 1, 2], 4),
    (0.2, 1.0, 0.5, [0, 2, 4], 6),
    (1.0, 2.0, 0.3, [0, 3], 6),
    (2.0, 0.5, 0.2, [1, 2, 3, 4], 6),
    (1.0, 1.0, 0.01, [0, 2], 5),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("a", "rho", "b", "participations", "steps"), SETTINGS)
def test_no_history_shifts_a_run_further_than_the_theorem_allows(
    a: float, rho: float, b: float, participations: list[int], steps: int
) -> None:
    found = most_found(a=a, rho=rho, b=b, participations=participations, steps=steps)
    k = len(participations)
    bound = min(
        squared_shifts(a, rho, b, k, steps), k * a**2 + (steps - 1) * 4 * b**2 + 4 * a * b * (k - 1)
    )
    assert found <= bound * (1 + 1e-9)
    # a search that finds nothing shows nothing
    assert found >= (0.97 if k == 1 and 2 * b >= rho else 0.3) * bound


@pytest.mark.parametrize(
    ("a", "rho", "b"),
    [
        (1.0, 3.0, 0.5),
        pytest.param(1.0, 1.0, 1.0, marks=pytest.mark.variants),
        pytest.param(0.3, 1.0, 0.2, marks=pytest.mark.variants),
    ],
)
def test_replace_one_is_the_same_with_both_bounds_doubled(a: float, rho: float, b: float) -> None:
    found = most_found(a=a, rho=rho, b=b, participations=[0, 2], steps=5, replace=True)
    doubled = squared_shifts(2 * a, 2 * rho, b, 2, 5)
    assert 0.3 * doubled <= found <= doubled * (1 + 1e-9)
    # What is charged: twice S, by the event's own doubling.
    assert doubled <= 4 * squared_shifts(a, rho, b, 2, 5) * (1 + 1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("a", "rho", "b"), [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
def test_with_resets_passes_are_separate(a: float, rho: float, b: float) -> None:
    found = most_found(a=a, rho=rho, b=b, participations=[1, 3], steps=6, reset_every=3)
    bound = 2 * squared_shifts(a, rho, b, 1, 3)
    assert 0.6 * bound <= found <= bound * (1 + 1e-9)


def test_the_search_finds_what_a_wrong_analysis_would_miss() -> None:
    """Each mutant's own S is exceeded, so the search above can fail."""
    a, rho, b = 1.0, 1.0, 1.0
    allowed = squared_shifts(a, rho, b, 1, 6)
    unclipped = most_found(a=a, rho=5 * rho, b=b, participations=[0], steps=6)
    normalised = most_found(a=a, rho=rho, b=b, participations=[0], steps=6, clip=normalise)
    assert unclipped > 1.5 * allowed
    assert normalised > 1.5 * allowed
    twice = most_found(a=a, rho=rho, b=b, participations=[0, 1], steps=6)
    assert twice > 1.5 * allowed  # participations counted once
    # resets charged, not done
    assert most_found(a=a, rho=rho, b=b, participations=[0, 3], steps=6) > 1.02 * 2 * allowed
    batch = 10
    assert (
        squared_shifts(a / batch, rho / batch, b, 1, 6) < allowed / 50
    )  # a and rho on the mean's scale, noise on the sum's


STEPS_A_PASS = 20


def of_run(a: float, rho: float, b: float, k: int, *, reset: bool) -> float:
    held = math.inf if math.isinf(rho) else 100 * (a + rho)
    return run_sensitivity(
        clip=a,
        residual=rho,
        feedback=b,
        passes=k,
        steps_per_pass=STEPS_A_PASS,
        reset=reset,
        held=held,
    )


def test_the_bounds_are_ordered() -> None:
    for a, rho, b, k in itertools.product((0.5, 1.0), (0.1, 1.0, 5.0), (0.1, 1.0, 10.0), (1, 2, 5)):
        with_resets, without = of_run(a, rho, b, k, reset=True), of_run(a, rho, b, k, reset=False)
        assert math.sqrt(k) * a < with_resets <= without * (1 + 1e-6)
        assert with_resets**2 <= k * (a**2 + rho * min(rho, 2 * b)) * (1 + 1e-6)
        simple = (
            k * (a**2 + rho**2) + k * (k - 1) * rho * max(a, rho),
            k * a**2 + 2 * k * b * rho + 2 * a * (k - 1) * min(2 * b, math.sqrt(2 * b * rho)),
            (k * rho) ** 2 + 2 * a * math.sqrt(k - 1) * k * rho + k * a**2,
        )
        assert without**2 <= min(simple) * (1 + 1e-6)
        assert (
            without
            <= of_run(a, math.inf, b, k, reset=False)
            <= math.sqrt(k * STEPS_A_PASS) * (a + 2 * b)
        )
    assert of_run(1.0, 0.0, 5.0, 4, reset=False) == 2.0


def step(memory: ErrorFeedback, sums: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    asked_before = [
        part.clone() for part in memory.query([[part.clone() for part in sums[0]], sums[1]])
    ]
    released = memory.query(sums)  # again, as after an interruption
    assert all(torch.equal(a, b) for a, b in zip(asked_before, released, strict=True))
    memory.released(sums)
    return released


def test_what_is_fed_back_is_the_projection_and_the_rest_stays() -> None:
    memory = ErrorFeedback(2.0, None)
    zero = [torch.zeros(3).double(), torch.zeros(2).double()]
    rest = [torch.tensor([3.0, 0.0, 0.0]).double(), torch.tensor([0.0, 4.0]).double()]
    first = step(memory, [[z.clone() for z in zero], rest])
    assert all(torch.equal(x, z) for x, z in zip(first, zero, strict=True))  # nothing is known yet
    fed = [torch.cat(step(memory, [[z.clone() for z in zero], zero])) for _ in range(4)]
    direction = torch.cat(rest) / 5
    for vector, length in zip(fed, (2.0, 2.0, 1.0, 0.0), strict=True):
        assert torch.allclose(vector, direction * length)


def test_the_state_is_reset_between_passes() -> None:
    memory = ErrorFeedback(1.0, 2)
    one = torch.ones(1).double()
    fed = [float(step(memory, [[torch.zeros(1).double()], [one]])[0]) for _ in range(6)]
    assert fed == [0, 1, 0, 1, 0, 1]


def test_norms_are_as_accurate_as_the_proof_wants() -> None:
    for size in (0, 1, 4095, 4096, 4097, 3_000_000):
        x = torch.full((size,), 1 / 3, dtype=torch.float64)
        assert norm([x, x]) == pytest.approx(math.sqrt(2 * size) / 3, rel=2.0**-40, abs=0)


def test_the_state_shows_nothing_and_cannot_be_copied() -> None:
    memory = ErrorFeedback(1.0, None)
    step(memory, [[torch.zeros(1).double()], [torch.full((1,), 1234.5).double()]])
    assert "1234" not in repr(memory)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            attempt(memory)
