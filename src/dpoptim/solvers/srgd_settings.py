"""Settings of Accelerated-DP-SRGD: those of the theorems, and those that work at ordinary sizes."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from dpoptim.accounting.guarantee import neighbours_differ_by
from dpoptim.arguments import positive_number, whole_number
from dpoptim.noise.correlated import BinaryTree, BufferedToeplitz, Independent, Strategy
from dpoptim.solvers.constraints import Ball, Constraint, Everywhere
from dpoptim.theory import accelerated_srgd as theory

Gradient = Literal["recursive", "independent"]


@dataclass(frozen=True)
class SRGD:
    """Settings of one run, all public; `suggested_settings` fills them in roughly.

    Args:
        steps: T, the number of batches.
        batch_size: B; the run uses the first T * B records, each once.
        clip_norm: C, the largest norm of what one record adds to a sum: ``eta_t grad f(x_t) -
            eta_{t-1} grad f(x_{t-1})`` for recursive gradients, ``grad f(x_t)`` for independent
            ones.
        beta: inverse step size; at least the smoothness of the loss, more where noise is large.
        gradient: ``"recursive"``, or ``"independent"``: each step's gradient from its own batch
            alone (their section 5.5).
        accelerated: False is plain projected descent with steps 1/beta (their section 4.3). With
            independent gradients it is single-pass DP-SGD for ``Independent()`` noise and DP-FTRL
            for any other mechanism.
        mechanism: noise over the steps; by default `BufferedToeplitz` for recursive gradients,
            `Independent` for others.
        constraint: a closed convex set that the iterates stay in.

    Raises:
        ValueError: naming the setting.

    Examples:
        >>> from dpoptim.solvers import SRGD
        >>> SRGD(steps=20, batch_size=50, clip_norm=1.0, beta=2.0).accelerated
        True
    """

    steps: int
    batch_size: int
    clip_norm: float
    beta: float
    gradient: Gradient = "recursive"
    accelerated: bool = True
    mechanism: Strategy | None = None
    constraint: Constraint = field(default_factory=Everywhere)

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)
        whole_number("batch_size", self.batch_size, least=1)
        for name in ("clip_norm", "beta"):
            positive_number(name, getattr(self, name))
        if self.gradient not in get_args(Gradient):
            raise ValueError(
                f'gradient must be "recursive" or "independent", got {self.gradient!r}.'
            )

    @property
    def noise(self) -> Strategy:
        """The mechanism that is used."""
        if self.mechanism is not None:
            return self.mechanism
        return BufferedToeplitz() if self.gradient == "recursive" else Independent()


def theorem_settings(
    n: int,
    dimension: int,
    epsilon: float,
    delta: float,
    *,
    lipschitz: float,
    smoothness: float,
    radius: float,
    minimiser_inside: bool,
) -> SRGD:
    """The settings of Eq. 19 (Theorem 5.8) or, for minimisers outside the set, Theorem 5.12.

    They carry a proof and large constants: Eq. 19 asks for more steps than there are records below
    about n = 1e7.

    Args:
        n: records.
        dimension: p.
        epsilon, delta: the budget that the settings are for.
        lipschitz, smoothness: L and M of every record's loss.
        radius: R; the constraint set is the ball of this radius.
        minimiser_inside: whether the population risk's unconstrained minimiser is known to be in
            the ball.

    Returns:
        settings for `accelerated_srgd`.

    Raises:
        ValueError: n is too small for the theorem.

    Examples:
        >>> from dpoptim.solvers import theorem_settings
        >>> settings = theorem_settings(
        ...     10**9,
        ...     5,
        ...     epsilon=2.0,
        ...     delta=1e-9,
        ...     lipschitz=1.0,
        ...     smoothness=1.0,
        ...     radius=1.0,
        ...     minimiser_inside=True,
        ... )
        >>> settings.steps > 1
        True
    """
    if minimiser_inside:
        found = theory.minimiser_inside(
            n, dimension, epsilon, delta, lipschitz=lipschitz, radius=radius
        )
    else:
        found = theory.minimiser_anywhere(
            n, lipschitz=lipschitz, smoothness=smoothness, radius=radius
        )
    if not found.feasible:
        raise ValueError(
            f"n={n} is too small for {found.source}, which asks for {found.steps:.3g} batches. "
            "Fix: suggested_settings."
        )
    steps = math.ceil(found.steps)
    return SRGD(
        steps,
        n // steps,
        found.clip_norm,
        found.beta,
        mechanism=BinaryTree(),
        constraint=Ball(radius),
    )


def suggested_settings(
    n: int,
    dimension: int,
    mu: float,
    *,
    lipschitz: float = 1.0,
    smoothness: float = 1.0,
    radius: float = 1.0,
    minimiser_inside: bool = True,
    neighboring: str = "zero-out",
) -> SRGD:
    """Settings as the theorems have them, constants of order 1; errors cost no privacy.

    T is ``2 n^(1/4)`` or, if the minimiser may lie outside of the set, ``sqrt(n)``; B = n / T and
    C = L. beta is the largest of M, of twice what balances the optimisation error ``beta R^2 /
    T^2`` with the sampling error ``C^2 / (B beta)`` and the privacy error ``p s^2 / (T beta)`` (s:
    standard deviation of the private prefix sums), and, if the minimiser may lie outside, of M T /
    4. (On the 24 private problems of ``reproduce.srgd_rates`` with n = 1e3, 1e4 and 1e5, given M
       and R, the excess risk was 1.1 times that of settings tuned on each; at worst 1.5 times.)

    Args:
        n: records.
        dimension: p.
        mu: of the budget, ``Budget.gdp``.
        lipschitz: about how large a record's gradient is.
        smoothness: about how large the curvature of a record's loss is.
        radius: about how far the minimiser is from the starting point.
        minimiser_inside: whether to go without the theorem for constrained minimisers.
        neighboring: as for `accelerated_srgd`.

    Returns:
        settings for `accelerated_srgd`.

    Examples:
        >>> from dpoptim.solvers import suggested_settings
        >>> suggested_settings(10_000, 20, mu=1.0).steps
        20
    """
    steps = math.ceil(2 * n**0.25) if minimiser_inside else math.ceil(math.sqrt(n))
    steps = min(steps, n)
    batch_size = n // steps
    clip_norm = lipschitz
    mechanism = BufferedToeplitz()
    sensitive = neighbours_differ_by(neighboring)
    noise = float(mechanism.prefix_std(steps)[-1]) * sensitive * clip_norm / (mu * batch_size)
    beta = max(
        smoothness if minimiser_inside else smoothness * max(1.0, steps / 4),
        2 * clip_norm * steps / (radius * math.sqrt(batch_size)),
        2 * math.sqrt(dimension * steps) * noise / radius,
    )
    return SRGD(steps, batch_size, clip_norm, beta, mechanism=mechanism)
