"""Ranking of settings by public numbers; no prediction of scores."""

import math

CURVATURE = 0.1  # of the three terms' weights the only one that is free
# chosen on five made-up tables; `python benchmarks/plan_ranks.py` compares with measured runs
REACH = 15.0
MOST_STEP = 40.0


def predicted_error(noise_to_signal: float, batch_size: float, steps: int) -> float:
    """Excess loss of SGD with well-chosen steps, up to a factor that all settings share.

    ``CURVATURE / T + sqrt((1 / B + v^2) / T)`` for T steps of batches of B, v the noise to signal:
    the way to the minimum, which takes steps, and the noise of sampling and of privacy, which
    averages out over them (Lan 2012, Theorem 1, for a smooth convex loss and clipped gradients
    in units of the clip norm).

    Args:
        noise_to_signal: length of a step's noise over the clip norm, both of the mean.
    """
    return CURVATURE / steps + math.sqrt((1 / batch_size + noise_to_signal**2) / steps)


def noise_to_signal(noise_multiplier: float, parameters: int, batch_size: float) -> float:
    """Length of a step's noise over the longest mean that clipped gradients can have."""
    return noise_multiplier * math.sqrt(parameters) / batch_size


def learning_rate(noise_to_signal: float, batch_size: float, steps: int, momentum: float) -> float:
    """A learning rate of SGD for a clip norm of 1; for C, over C. Two digits.

    ``REACH (1 - m) / sqrt((1 / B + v^2) T)``: with it the noise of all steps moves the weights
    about as far as the minimum is away (Lan 2012), but no longer than features of norm 1 to 10
    bear.
    """
    noise = math.sqrt((1 / batch_size + noise_to_signal**2) * steps)
    return float(f"{min(MOST_STEP, REACH / noise) * (1 - momentum):.2g}")


def adaptive_learning_rate(
    parameters: int, steps: int, taken_back: float = 1.0, reach: float = REACH
) -> float:
    """A learning rate of Adam, whatever the clip norm. Two digits.

    ``reach r / sqrt(d T)``: Adam moves each of d weights by about its rate where gradients are
    mostly noise, so that the noise of all steps moves them together by ``reach``.

    Args:
        taken_back: r, a step's noise over what lasts of it; see `planning.choice.taken_back`.
            ``nan``: as if all of it lasted.
        reach: by default as far as SGD's rule lets noise move them.
    """
    lasting = 1.0 if math.isnan(taken_back) else taken_back
    return float(f"{reach * lasting / math.sqrt(parameters * steps):.2g}")
