"""Theorem 3.6, Corollary 3.8 and Table 1 of Zhang et al. 2024, "Differentially Private SGD Without
Clipping Bias: An Error-Feedback Approach".

Convergence (Theorem 3.6) takes the noise as given, and stands. Corollary 3.8 and Table 1 put the
noise of Theorem 3.7 into it, which gives no such privacy (a counterexample is in the audits):
`published_rates` is what the paper claims. `proven_stationarity` puts in the noise that
`methods.error_feedback` proves. Losses in units of the loss, clip norms in units of its gradient.
"""

import math
from dataclasses import dataclass

from dpoptim.arguments import real_number, whole_number
from dpoptim.methods.error_feedback import run_sensitivity


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
            if not 0 < real_number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0.")
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
    """`stationarity_bound` with the noise that makes the run mu-GDP under zero-out, on fixed
    batches and without resets; ``residual_clip`` (R) at least the largest gradient, where
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


def published_rates(
    n: int, epsilon: float, delta: float, *, clip_norm: float, constant: float, gradient: float
) -> dict[str, float]:
    """Return Table 1's rates (unit constants) of ``|grad f|^2``; DiceSGD's is Corollary 3.8's, and
    rests on Theorem 3.7, which is false.

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
