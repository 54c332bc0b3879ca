"""Bounds of error feedback (Zhang et al. 2024): Theorem 3.6, Corollary 3.8, Table 1.

"Differentially Private SGD Without Clipping Bias: An Error-Feedback Approach".

Convergence (Theorem 3.6) takes the noise as given, and stands. Corollary 3.8 and Table 1 put the
noise of Theorem 3.7 into it, which gives no such privacy (a counterexample is in the audits):
`published_rates` is what the paper claims. `proven_stationarity` puts in the noise that
`methods.error_feedback` proves. Losses in units of the loss, clip norms in units of its gradient.
"""

import math
from dataclasses import dataclass

import numpy as np

from dpoptim.accounting.gaussian import gdp_delta
from dpoptim.arguments import positive_number, whole_number
from dpoptim.methods.error_feedback import run_sensitivity, squared_shifts


@dataclass(frozen=True)
class Smooth:
    """The problem of Theorem 3.6: a smooth loss, convex or not.

    Args:
        gap: ``f(x_0) - min f``, > 0.
        smoothness: L, > 0.
        dimension: d, the number of parameters.
    """

    gap: float
    smoothness: float
    dimension: int

    def __post_init__(self) -> None:
        for name in ("gap", "smoothness"):
            positive_number(name, getattr(self, name))
        whole_number("dimension", self.dimension, least=1)


def stationarity_bound(
    problem: Smooth, *, steps: int, clip_norm: float, feedback_clip: float, noise: float
) -> tuple[float, float]:
    """Return Theorem 3.6's bound on ``E |grad f(x_t)|^2`` over its law of t, and its step size.

    Args:
        problem: the loss.
        steps: T, >= 1.
        clip_norm: C1, > 0, of gradients.
        feedback_clip: C2, of the error; at least 3 C1 (and the gradients' deviation over the batch
            size more, which a caller knows).
        noise: sigma_1, the standard deviation of each entry of the released mean, >= 0.

    Raises:
        ValueError: feedback_clip below 3 C1, where the theorem says nothing.

    Examples:
        >>> from dpoptim.theory.error_feedback import Smooth, stationarity_bound
        >>> loss = Smooth(gap=1.0, smoothness=1.0, dimension=10)
        >>> bound, step = stationarity_bound(
        ...     loss, steps=3_200, clip_norm=1.0, feedback_clip=3.0, noise=0.0
        ... )
        >>> round(bound, 3), round(step, 4)
        (0.269, 0.0046)
    """
    if not 0 < 3 * clip_norm <= feedback_clip:
        raise ValueError(
            f"feedback_clip must be at least 3 clip_norm = {3 * clip_norm:g}, got "
            f"{feedback_clip:g}: Theorem 3.6 says nothing below."
        )
    steps = whole_number("steps", steps, least=1)
    sizes = 2 * clip_norm**2 + 3 * feedback_clip**2 + problem.dimension * noise**2
    inside = 2 * problem.gap * problem.smoothness * sizes / steps
    step_size = math.sqrt(2 * problem.gap / (steps * problem.smoothness * sizes))
    return 2 * math.sqrt(inside), step_size


def proven_stationarity(
    problem: Smooth,
    *,
    n: int,
    batch_size: int,
    passes: int,
    mu: float,
    clip_norm: float,
    feedback_clip: float,
    residual_clip: float,
) -> float:
    """`stationarity_bound` with the noise that makes the run mu-GDP under zero-out.

    On fixed batches and without resets; ``residual_clip`` (R) at least the largest gradient, where
    clipping what enters the error changes nothing.

    Unlike in Corollary 3.8, more passes end by doing harm: the error remembers a record, so the
    sensitivity grows by as much as the number of its participations.
    """
    steps_per_pass = math.ceil(n / batch_size)
    bound = run_sensitivity(
        clip=clip_norm,
        residual=residual_clip - clip_norm,
        feedback=feedback_clip * batch_size,
        passes=passes,
        steps_per_pass=steps_per_pass,
        reset=False,
        held=passes * n * residual_clip,
    )
    return stationarity_bound(
        problem,
        steps=passes * steps_per_pass,
        clip_norm=clip_norm,
        feedback_clip=feedback_clip,
        noise=bound / (mu * batch_size),
    )[0]


def sampled_delta(
    epsilon: float,
    *,
    clip: float,
    residual: float,
    feedback: float,
    passes: int,
    steps_per_pass: int,
    noise: float,
) -> float:
    """Return what can be proved of error feedback on Poisson batches: delta at ``epsilon``.

    The state is reset every ``steps_per_pass`` steps.

    **Theorem.** Let a record join each step by a coin of bias 1 / ``steps_per_pass``, the same in
    both worlds (zero-out). Whoever is told the steps that it joined sees a pair that the theorem of
    `methods.error_feedback` makes ``S / noise``-GDP, S^2 the sum over passes of that of as many
    participations. Being told can only help, so delta is at most the mean of theirs. QED.

    It amplifies nothing: a fixed batch has one participation a pass for certain, and the mean of a
    convex function of a random number is more than that of its mean.

    Args:
        clip: C1. residual: R - C1, > 0. feedback: C2 times the batch size. noise: standard
            deviation on the sum. All in one unit, in exact arithmetic.
        passes, steps_per_pass: >= 1.

    Examples:
        >>> from dpoptim.theory.error_feedback import sampled_delta
        >>> run = dict(clip=1.0, residual=1.0, feedback=4_000.0, noise=12.61)  # 1e-5 if fixed
        >>> round(1e5 * sampled_delta(2.0, passes=20, steps_per_pass=15, **run))
        55
    """
    from scipy.stats import binom

    numbers = np.arange(steps_per_pass + 1)
    kept = numbers[binom.sf(numbers - 1, steps_per_pass, 1 / steps_per_pass) > 1e-12]
    left_out = float(binom.sf(kept[-1], steps_per_pass, 1 / steps_per_pass))
    each = [squared_shifts(clip, residual, feedback, int(k), steps_per_pass) for k in kept[1:]]
    unit = each[0] / 10
    places = np.ceil(np.array([0.0, *each]) / unit - 1e-9).astype(int)  # rounded up
    of_pass = np.bincount(places, binom.pmf(kept, steps_per_pass, 1 / steps_per_pass))
    chances = np.ones(1)
    for _ in range(passes):
        chances = np.convolve(chances, of_pass)
    likely = np.flatnonzero(chances > 1e-30)
    deltas = [gdp_delta(math.sqrt(place * unit) / noise, epsilon) for place in likely.tolist()]
    return float(chances[likely] @ deltas) + passes * left_out


def published_rates(
    n: int, epsilon: float, delta: float, *, clip_norm: float, constant: float, gradient: float
) -> dict[str, float]:
    """Return Table 1's rates (unit constants) of ``|grad f|^2``.

    DiceSGD's is Corollary 3.8's, and rests on Theorem 3.7, which is false.

    Args:
        n: records. epsilon, delta: the claim.
        clip_norm: C1. constant: C, with C2 <= C/B. gradient: G, the largest there is; DP-SGD
            without bias needs to clip there. Clipping below leaves a bias of order 1 besides.
    """
    root = math.sqrt(math.log(1 / delta)) / (n * epsilon)
    both = clip_norm**2 + 2 * min(constant, gradient) ** 2
    return {
        "DP-SGD": gradient * root,
        "DP-SGD, clipped, without its bias": clip_norm * root,
        "DiceSGD as published": math.sqrt(both) * root,
    }
