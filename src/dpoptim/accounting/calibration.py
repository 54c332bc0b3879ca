"""How much noise a budget needs.

**Guarantee.** The noise multiplier returned always satisfies `compute_epsilon(event, ...) <=
epsilon`, where `compute_epsilon` is the very function that plans print from; the search before
that check can only make the noise a little larger than necessary (epsilon ends between 99 % and
100 % of the target).
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

import dp_accounting as dp

from dpoptim.accounting.accountant import check_delta, check_epsilon, compute_epsilon, rough_epsilon
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.accounting.guarantee import neighboring_name, neighbours_differ_by, parse_neighboring
from dpoptim.accounting.monte_carlo import MonteCarloDpEvent

_log_of_waits = logging.getLogger(__name__)
_LOOSEST = 0.99  # epsilon achieved, at least, as a share of the target
_RANGE = (math.log(1e-2), math.log(1e9))  # of log noise multipliers that are worth considering


def calibrate_noise_multiplier(
    *,
    sample_rate: float,
    steps: int,
    epsilon: float,
    delta: float,
    neighboring: str | dp.NeighboringRelation,
) -> float:
    """The least noise multiplier at which `steps` Poisson-sampled sums cost at most `epsilon`.

    Args:
      sample_rate: chance of each record to be in a batch, in (0, 1]; 1 means full batches.
      steps: number of sums, >= 1.
      epsilon: the budget, > 0; the result costs between 99 % and 100 % of it, never more.
      delta: in (1e-14, 1).
      neighboring: "add-or-remove-one", "replace-one" or "zero-out".

    Returns:
        the noise's standard deviation on the sum, over the clip norm. Results are kept in
        `$DPOPTIM_CACHE_DIR` (else the user's cache directory), and a stored value is evaluated
        again before it is returned: a checksum could not tell a value that an older, mistaken
        version wrote from a right one, and the printed guarantee needs the evaluation anyway.

    Raises:
        ValueError: an argument is out of range, or the budget is met without noise.

    Examples:
        >>> from dpoptim.accounting import calibrate_noise_multiplier
        >>> z = calibrate_noise_multiplier(
        ...     sample_rate=0.01, steps=500, epsilon=2.0, delta=1e-5, neighboring="zero-out"
        ... )
        >>> 0.7 < z < 0.9
        True
    """
    steps = _checked_steps(steps)
    if not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate: expected a number in (0, 1], got {sample_rate!r}; it is the expected "
            "batch size divided by the number of records"
        )
    check_delta(delta)
    check_epsilon(epsilon)
    relation = parse_neighboring(neighboring)

    def event_of(noise_multiplier: float) -> dp.DpEvent:
        step = dp.PoissonSampledDpEvent(float(sample_rate), dp.GaussianDpEvent(noise_multiplier))
        return dp.SelfComposedDpEvent(step, steps)

    if sample_rate == 1:
        return _full_batch_noise(steps, epsilon, delta, relation)
    return calibrate_remembered(
        event_of,
        epsilon=epsilon,
        delta=delta,
        neighboring=relation,
        start=_central_limit_noise(sample_rate, steps, epsilon, delta, relation),
    )


def calibrate_remembered(
    event_of: Callable[[float], dp.DpEvent],
    *,
    epsilon: float,
    delta: float,
    neighboring: str | dp.NeighboringRelation,
    start: float = 1.0,
) -> float:
    """`calibrate_event`, whose results are kept as `calibrate_noise_multiplier` says.

    Results are known by ``event_of(1.0)``; another event with the same one there costs time only,
    for what is stored is evaluated.
    """
    relation = parse_neighboring(neighboring)
    key = {
        "event": hashlib.sha256(repr(event_of(1.0)).encode()).hexdigest(),
        "epsilon": float(epsilon),
        "delta": float(delta),
        "neighboring": neighboring_name(relation),
        "dp_accounting": version("dp-accounting"),
    }
    stored = read_noise(key)
    # what no search would end with was not written by one, and may not even be evaluated
    if stored is not None and _RANGE[0] <= math.log(stored) <= _RANGE[1]:
        event = event_of(stored)
        _say("evaluating a noise multiplier of earlier", event)
        if _LOOSEST <= compute_epsilon(event, delta, relation).epsilon / epsilon <= 1:
            return stored
    noise_multiplier = calibrate_event(
        event_of, epsilon=epsilon, delta=delta, neighboring=relation, start=start
    )
    write_noise(key, noise_multiplier)
    return noise_multiplier


def calibrate_event(
    event_of: Callable[[float], dp.DpEvent],
    *,
    epsilon: float,
    delta: float,
    neighboring: str | dp.NeighboringRelation,
    start: float = 1.0,
) -> float:
    """The least noise multiplier z at which `event_of(z)` costs at most `epsilon`, and 99 % of it.

    Args:
      event_of: the event as a function of z > 0; its epsilon must fall as z grows.
      epsilon, delta, neighboring: the budget, as for `calibrate_noise_multiplier`.
      start: where to begin searching.

    Returns:
        z > 0, a noise multiplier.

    Raises:
        ValueError: the budget is met with almost no noise, or cannot be met with any.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import calibrate_event
        >>> z = calibrate_event(
        ...     dp.GaussianDpEvent, epsilon=1.0, delta=1e-5, neighboring="add-or-remove-one"
        ... )
        >>> 3.7 < z < 3.8
        True
    """
    check_delta(delta)
    check_epsilon(epsilon)
    relation = parse_neighboring(neighboring)

    def rough(log_noise: float) -> float:
        event = event_of(math.exp(log_noise))
        _say("calibrating, roughly", event)
        return _log(rough_epsilon(event, delta, relation, epsilon) / epsilon)

    def reported(log_noise: float) -> float:
        event = event_of(math.exp(log_noise))
        _say("calibrating", event)
        return _log(compute_epsilon(event, delta, relation).epsilon / epsilon)

    try:
        # The rough bound is 1 to 3 % above the fine one near the target.
        near, slope = _descend(rough, math.log(start), 1e-2, 3e-2, slope=-1.0)
        # Aims at 99.8 % of the target, so that the second evaluation is nearly always the last.
        found, _ = _descend(reported, near, -4e-3, 0.0, slope=slope)
    except _OutOfRangeError as error:
        raise ValueError(f"epsilon: {epsilon:g} at delta={delta:g} {error}") from None
    return math.exp(found)


def _say(what: str, event: dp.DpEvent) -> None:
    """Log an evaluation that takes long; public numbers."""
    if isinstance(event, MonteCarloDpEvent):
        _log_of_waits.info(
            "%s: Monte Carlo at noise multiplier %.4g; this can take a minute",
            what,
            event.noise_multiplier,
        )


class _OutOfRangeError(Exception):
    """The search left the noise multipliers worth considering."""


def _descend(
    value: Callable[[float], float], start: float, low: float, high: float, *, slope: float
) -> tuple[float, float]:
    """x with `low <= value(x) <= high` for a falling function, and the function's slope there.

    Secant steps inside a bracket. Where the function jumps over the window, the x just right of
    the jump.
    """
    left, right = -math.inf, math.inf  # value(left) > high, value(right) < low
    x, previous = start, None
    for turn in range(100):
        y = value(x)
        if low <= y <= high:
            return x, slope
        left, right = (x, right) if y > high else (left, x)
        if previous is not None and math.isfinite(y) and math.isfinite(previous[1]):
            measured = (y - previous[1]) / (x - previous[0])
            slope = measured if measured < -1e-3 else slope
        previous = (x, y)
        if right - left < 1e-9:
            return right, slope
        step = ((low + high) / 2 - y) / slope if math.isfinite(y) else math.copysign(1.0, y)
        x += min(max(step, -1.0), 1.0)
        if not left < x < right or (turn % 4 == 3 and math.isfinite(right - left)):
            x = (left + right) / 2
        _refuse_extremes(x)
    raise _OutOfRangeError("cannot be met: the event's epsilon does not fall as its noise grows")


def _refuse_extremes(x: float) -> None:
    if x < _RANGE[0]:
        raise _OutOfRangeError(
            "is met with almost no noise; use a smaller delta, or a smaller epsilon"
        )
    if x > _RANGE[1]:
        raise _OutOfRangeError(
            "cannot be met with any noise; use a larger epsilon, or fewer or cheaper steps"
        )


def _checked_steps(steps: object) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or int(steps) < 1:
        raise ValueError(f"steps: expected an integer >= 1, got {steps!r}")
    return int(steps)


def _central_limit_noise(
    sample_rate: float, steps: int, epsilon: float, delta: float, relation: dp.NeighboringRelation
) -> float:
    """A noise multiplier by the central limit theorem for many subsampled steps: to start from.

    mu = q sqrt(T (exp(z^-2) - 1)) (Bu, Dong, Long and Su 2020, Corollary 4), solved for z.
    """
    mu = gdp_mu(epsilon, delta)
    return neighbours_differ_by(relation) * math.log1p((mu / sample_rate) ** 2 / steps) ** -0.5


def _full_batch_noise(
    steps: int, epsilon: float, delta: float, relation: dp.NeighboringRelation
) -> float:
    """Invert the exact profile; the loop makes up for the last digits of the root searches."""
    noise_multiplier = neighbours_differ_by(relation) * math.sqrt(steps) / gdp_mu(epsilon, delta)
    step = 1e-12
    while True:
        event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise_multiplier), steps)
        if compute_epsilon(event, delta, relation).epsilon <= epsilon:
            return noise_multiplier
        noise_multiplier, step = noise_multiplier * (1 + step), 2 * step


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def read_noise(key: Mapping[str, Any]) -> float | None:
    """The noise multiplier stored under `key`; None if there is none that makes sense."""
    try:
        data = json.loads(cache_file(key).read_text(encoding="utf-8"))
        value = data["noise_multiplier"] if data["key"] == dict(key) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float) and 0 < value < math.inf else None


def write_noise(key: Mapping[str, Any], noise_multiplier: float) -> None:
    """Store a noise multiplier, whole or not at all; nothing where the directory is read-only."""
    with contextlib.suppress(OSError, RuntimeError):
        path = cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": dict(key), "noise_multiplier": noise_multiplier}, file)
            os.replace(temporary, path)  # two processes that calibrate the same thing both succeed
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def cache_file(key: Mapping[str, Any]) -> Path:
    if chosen := os.environ.get("DPOPTIM_CACHE_DIR"):
        directory = Path(chosen)
    elif base := os.environ.get("XDG_CACHE_HOME"):
        directory = Path(base) / "dpoptim"
    else:
        directory = Path.home() / ".cache" / "dpoptim"  # RuntimeError where there is no home
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return directory / f"calibration-{digest[:32]}.json"
