"""Every method attacked through its own code, under the name that the command line knows it by.

Each audit runs the method as its user would and compares what the best attack certifies with what
was promised.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.accounting import gdp_epsilon
from dpoptim.accounting.accountant import gaussian_mu
from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.guarantee import parse_neighboring
from dpoptim.audit import statistics as released_statistics
from dpoptim.audit.adaptive import from_gradients, from_norms
from dpoptim.audit.bounds import Errors, epsilon_lower_bound
from dpoptim.audit.family import SampledGaussians, attainable_errors
from dpoptim.audit.side_by_side import RUNS, CanaryProblem, Floats, lowest, releases_kept, separate
from dpoptim.audit.turns import family_of_turns, scores_of_turns
from dpoptim.audit.two_worlds import (
    LENGTH,
    Attack,
    audit_two_worlds,
    canary_scores,
    sampled_gaussians,
)
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.plan import Plan
from dpoptim.solvers import Budget, Objective, kl_spider, noisy_gd, proximal_point
from dpoptim.solvers.accelerated_srgd import SRGD, accelerated_srgd
from dpoptim.solvers.momentum_gd import momentum_gd
from dpoptim.training.attach import attach

DELTA = 1e-5
# of the audited runs that are one Gaussian: where a few thousand trials show most of a claim
MU = 1.5
MOST_RELEASES = 16_000_000  # numbers that the worlds of a plan's audit keep
WEAK = "too weak to tell"
STRONG = 0.5  # of a claim that an attack must be able to show, or its silence says nothing
# of each lower bound: all audits together raise a false alarm with probability below 2e-5
CONFIDENCE = 1 - 1e-6


@dataclass(frozen=True)
class Finding:
    """Outcome of the audit of one method.

    Attributes:
        claimed, lower_bound, limit: epsilons at ``delta``: promised, certified, and what as many
            trials could show at best.
        trials: certifying trials; 0 where the attack's error rates were computed and not sampled.
        verdict: ``"refuted"``, ``"consistent"``, or ``"too weak to tell"`` where ``limit`` is
            below half of the claim.
        trials_needed: how many of these trials would have a limit of half the claim, if these are
            too few; else 0.
        expected: what the verdict should be: the paper's accounting of DiceSGD is false.
    """

    method: str
    claimed: float
    lower_bound: float
    limit: float
    delta: float
    trials: int
    verdict: str
    expected: str
    seconds: float
    trials_needed: int = 0

    @property
    def as_expected(self) -> bool:
        """Whether nothing is wrong; an attack that is too weak to tell has found nothing wrong."""
        return self.verdict in (self.expected, WEAK)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dp_sgd(
    trials: int, seed: int, *, sample_rate: float = 1.0, steps: int = 4, noise: float = 2.0
) -> Finding:
    plan = DPSGD(1.0).plan(
        n=trials,
        batch_size=max(1, round(sample_rate * trials)),
        steps=steps,
        noise_multiplier=noise,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed)


BY_STEPS = Attack(canary_scores, sampled_gaussians)
BY_TURNS = Attack(scores_of_turns, family_of_turns)


def two_worlds_finding(plan: Plan, seed: int, attack: Attack = BY_STEPS) -> Finding:
    """What the two-world audit finds of a plan that samples, or takes every record in every
    step.
    """
    result = audit_two_worlds(
        plan, confidence=CONFIDENCE, seed=seed, noise_seed=seed, attack=attack
    )
    family = attack.family(plan)

    def needed() -> int:  # half of the trials choose the threshold, and certify nothing
        return 2 * family.trials_that_show_half(
            plan.noise_multiplier, result.claimed, plan.delta, CONFIDENCE
        )

    return finding(result.claimed, result.lower_bound, result.limit, result.trials, needed=needed)


def dp_ftrl(trials: int, seed: int, *, noise: Any, passes: int = 1) -> Finding:
    steps_per_pass = 6
    method = DPFTRL(1.0, noise=noise, order="given")
    plan = method.plan(
        n=trials * steps_per_pass,
        batch_size=trials,
        epochs=passes,
        noise_multiplier=1 / MU,
        delta=DELTA,
        neighboring="zero-out",
    )
    return fixed_order_plan(plan, trials, seed)


def dp_ftrl_by_turns(trials: int, seed: int, *, rate: float = 0.5, bands: int = 4) -> Finding:
    """Banded noise on batches sampled by turns; at ``rate`` 1 a part is taken whole, and the
    attack shows most.
    """
    plan = DPFTRL(1.0, sampling="cyclic-poisson", bands=bands).plan(
        n=trials - trials % bands,
        batch_size=round(rate * trials) // bands,
        steps=3 * bands,
        noise_multiplier=math.sqrt(3) / MU if rate == 1 else 0.7,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed, BY_TURNS)


def fixed_order_plan(plan: Plan, trials: int, seed: int) -> Finding:
    """Canaries in the first batch of fixed batches in given order: that is where a record is best
    seen.

    Args:
        plan: of a method that takes its batches in the data set's order. Steps and noise stay.
        trials: runs side by side; fewer where there are many steps, so that their releases fit
            memory.
    """
    trials = min(trials, max(1000, MOST_RELEASES // plan.steps))
    steps_per_pass = math.ceil(plan.n / plan.batch_size)
    n = trials * steps_per_pass
    plan = replace(plan, n=n, batch_size=trials)

    def world(presence: float, world_seed: int) -> Floats:
        index = torch.arange(trials).repeat(steps_per_pass)
        weight = torch.zeros(n, dtype=torch.float64)
        weight[:trials] = presence
        return table_releases(plan, TensorDataset(index, weight), trials, world_seed)

    found = separate(world, low=lowest(plan.neighboring), confidence=CONFIDENCE, seed=seed * 10)
    return gaussian_finding(found, mu_of(plan))


def mu_of(plan: Plan) -> float:
    """What a run claims that is one Gaussian.

    Raises:
        ValueError: it is none.
    """
    mu = gaussian_mu(canonical(plan.event), parse_neighboring(plan.neighboring))
    if mu is None:
        raise ValueError(
            f"a plan for {plan.method.name!r} on this sampler is not one Gaussian, as this attack "
            "supposes."
        )
    return mu


def table_releases(plan: Plan, data: TensorDataset, columns: int, seed: int) -> Floats:
    """Each record's gradient is its weight times 16 C at its own entry of a table; what each step
    releases.
    """
    table = nn.Embedding(columns, 1, dtype=torch.float64)
    with torch.no_grad():
        table.weight.zero_()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with (
        releases_kept(columns) as kept,
        attach(plan, table, optimizer, data, noise_seed=seed, label="audit") as private,
    ):
        for index, weight in private.batches():
            private.backward(table(index)[:, 0] * weight * LENGTH)
            optimizer.step()
    return torch.stack(kept).numpy()


def solver(
    name: str, trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out"
) -> Finding:
    """A whole-run solver on records of which one, the canary, has a gradient."""
    run = SOLVERS[name]

    def world(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(8)
        records[0] = presence
        objective = Objective(
            CanaryProblem(trials, capacity=8), (records,), neighboring=neighboring
        )
        with releases_kept(trials) as kept:
            run(objective, Budget(DELTA, mu=mu), world_seed)
        return torch.stack(kept).numpy()

    return gaussian_finding(
        separate(world, low=lowest(neighboring), confidence=CONFIDENCE, seed=seed * 10), mu
    )


def adaptive(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    """Adaptive gradient descent where it spends nearly all on gradients."""
    budget = Budget(DELTA, mu=mu)
    return gaussian_finding(
        from_gradients(
            trials, seed * 10, budget=budget, neighboring=neighboring, confidence=CONFIDENCE
        ),
        mu,
    )


def adaptive_norms(
    trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out"
) -> Finding:
    """Adaptive gradient descent where it spends nearly all on norms; a tenth of the trials, since
    each is a run.
    """
    runs, budget = max(1000, trials // 10), Budget(DELTA, mu=mu)
    found = from_norms(
        runs, seed * 10**6, budget=budget, neighboring=neighboring, confidence=CONFIDENCE
    )
    return gaussian_finding(found, mu)


def srgd(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    steps, batch = 8, 4

    def world(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(steps * batch)
        records[0] = presence
        with releases_kept(trials) as kept:
            accelerated_srgd(
                CanaryProblem(trials, capacity=len(records)),
                (records,),
                SRGD(steps, batch, 1.0, 1.0),
                budget=Budget(DELTA, mu=mu),
                neighboring=neighboring,
                noise_seed=world_seed,
            )
        return torch.stack(kept).numpy()

    return gaussian_finding(
        separate(world, low=lowest(neighboring), confidence=CONFIDENCE, seed=seed * 10), mu
    )


def released_means(plan: Plan, x: Tensor, seed: int) -> Tensor:
    """What each step releases when record i's gradient is x[i] whatever the model: shape
    (steps,).
    """
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    with attach(plan, model, optimizer, TensorDataset(x[:, None]), noise_seed=seed) as private:
        for (batch,) in private.batches():
            private.backward(model(batch)[:, 0])
            optimizer.step()
            found.append(-float(model.weight.detach()))
            with torch.no_grad():
                model.weight.zero_()
    return torch.tensor(found, dtype=torch.float64)


def dice_sgd(trials: int, seed: int) -> Finding:
    plan = DiceSGD(1.0, 1.0, 2.0).plan(
        n=12, batch_size=4, epochs=1, noise_multiplier=1 / MU, delta=DELTA
    )
    return dice_sgd_plan(plan, range(plan.n), seed)


def dice_sgd_plan(plan: Plan, records: Sequence[int], seed: int) -> Finding:
    """The shift of one of ``records`` in the true run, noise off, against the plan's noise: the
    exact likelihood ratio.
    """
    quiet = replace(plan, noise_multiplier=0.0)
    deviation = plan.query.standard_deviation / plan.batch_size
    nobody = torch.zeros(plan.n, dtype=torch.float64)
    best = 0.0
    largest = 100 * plan.method.rule.norm
    low = -largest if plan.neighboring == "replace-one" else 0.0
    for record in records:
        somebody = nobody.clone()
        nobody[record], somebody[record] = low, largest
        shift = released_means(quiet, somebody, seed) - released_means(quiet, nobody, seed)
        nobody[record] = 0.0
        best = max(best, float(shift.norm()) / deviation)
    return finding(plan.guarantee.epsilon, gdp_epsilon(best, DELTA), plan.guarantee.epsilon, 0)


def dice_sgd_as_published(trials: int, seed: int) -> Finding:
    """One record with a huge gradient fills the hidden state when it is first drawn, and shifts
    every later step by C2.

    Threshold tests on the sum of all steps; their error rates are computed: the first draw is
    geometric.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the verdict says it
        method = DiceSGD(1.0, 1.0, accounting="paper")
    plan = method.plan(n=1000, batch_size=20, steps=400, epsilon=1.0, delta=DELTA)
    somebody = torch.zeros(plan.n, dtype=torch.float64)
    somebody[17] = 1e6
    shift = released_means(replace(plan, noise_multiplier=0.0), somebody, seed).numpy()
    first = int(np.flatnonzero(shift)[0])
    each = float(shift[first + 1 :].min())  # what the true run shows: about C2 in every later step
    deviation = plan.query.standard_deviation / plan.batch_size * math.sqrt(plan.steps)
    before = np.arange(plan.steps)
    q = plan.batch_size / plan.n
    chance, moved = q * (1 - q) ** before, each * (plan.steps - 1 - before)
    cuts = np.linspace(0, 20, 400)
    power = np.array([float(chance @ ndtr(moved / deviation - cut)) for cut in cuts])
    level = ndtr(-cuts)
    usable = (power > DELTA) & (level > 0)
    lower = float(np.log((power[usable] - DELTA) / level[usable]).max(initial=0.0))
    return finding(plan.guarantee.epsilon, lower, lower, 0, expected="refuted")


def low_quantile(trials: int, seed: int, *, epsilon: float = 2.0) -> Finding:
    """The exponential mechanism for the clip norm, on data where one record shifts every count.

    The record goes from below all candidates to above them, as it also does when it is zeroed out.
    In the lower seven octaves the count was the rank and falls one short of it; in the highest
    octave it was one above and becomes the rank. So the scores of the one fall by 1, those of the
    other rise by 1, and their odds change by ``e^epsilon``, all that the guarantee allows. The
    chance changes by nearly as much where it is small, but then takes many runs to measure.
    """
    runs = max(2000, trials // 10)
    low, edge, high = 1.0, 128.0, 256.0
    chosen = []
    for canary, start in ((0.5, 0), (1000.0, runs)):
        values = torch.tensor([canary] + [0.5] * 5 + [edge] + [1000.0] * 5)
        seeds = range(seed * 10**6 + start, seed * 10**6 + start + runs)
        drawn = [
            private_low_quantile(values, 0.5, epsilon=epsilon, low=low, high=high, noise_seed=s)[0]
            for s in seeds
        ]
        chosen.append(np.array([value > edge for value in drawn]))
    errors = Errors(int(chosen[0].sum()), runs, int((~chosen[1]).sum()), runs)
    # of the 8 candidates above the edge against the 57 others
    odds = 8 / 57 * np.exp([-epsilon / 2, epsilon / 2])
    rates = odds / (1 + odds)
    expected = expected_of(runs, rates)
    lower, limit = (epsilon_lower_bound(each, 0.0, CONFIDENCE) for each in (errors, expected))

    def needed() -> int:
        trials = runs
        while epsilon_lower_bound(expected_of(trials, rates), 0.0, CONFIDENCE) < STRONG * epsilon:
            trials *= 2
        return 2 * trials

    return finding(epsilon, lower, limit, 2 * runs, needed=needed)


def expected_of(runs: int, rates: Floats) -> Errors:
    """The wrong guesses of an attack that says "present" at these rates in the two worlds."""
    return Errors(round(runs * rates[0]), runs, round(runs * (1 - rates[1])), runs)


def statistic(name: str, trials: int, seed: int) -> Finding:
    """A released statistic: the exact shift of its vector by the worst record, against the noise
    that it gets.
    """
    claimed = gdp_epsilon(released_statistics.MU, DELTA)
    return finding(claimed, gdp_epsilon(released_statistics.largest_mu(name), DELTA), claimed, 0)


def gaussian_finding(found: Any, claimed_mu: float) -> Finding:
    family = SampledGaussians(1.0, 1, "zero-out")
    attainable = attainable_errors(
        family.tradeoff(1 / claimed_mu), found.errors.absent_trials, CONFIDENCE
    )
    limit = family.lower_bound(attainable, DELTA, CONFIDENCE)
    trials = found.errors.absent_trials + found.errors.present_trials
    claimed = gdp_epsilon(claimed_mu, DELTA)

    def needed() -> int:
        return 2 * family.trials_that_show_half(1 / claimed_mu, claimed, DELTA, CONFIDENCE)

    return finding(
        claimed, gdp_epsilon(found.mu, DELTA) if found.mu > 0 else 0.0, limit, trials, needed=needed
    )


def finding(
    claimed: float,
    lower: float,
    limit: float,
    trials: int,
    expected: str = "consistent",
    *,
    needed: Callable[[], int] = lambda: 0,
) -> Finding:
    """The verdict on a claim. Args: needed: how many trials would do, asked only if these are too
    few.
    """
    weak = limit < STRONG * claimed
    verdict = "refuted" if lower > claimed * (1 + 1e-9) else WEAK if weak else "consistent"
    trials_needed = needed() if verdict == WEAK else 0
    return Finding("", claimed, lower, limit, DELTA, trials, verdict, expected, 0.0, trials_needed)


SOLVERS: dict[str, Callable[[Objective, Budget, int], Any]] = {
    "momentum-gd": lambda o, b, s: momentum_gd(
        o, None, b, lipschitz=1.0, steps=10, step_size=0.1, noise_seed=s
    ),
    "noisy-gd": lambda o, b, s: noisy_gd(
        o, None, b, lipschitz=1.0, steps=10, step_size=0.1, noise_seed=s
    ),
    "kl-spider": lambda o, b, s: kl_spider(
        *(o, None, b),
        lipschitz=1.0,
        smoothness=1.0,
        kl_gamma=1.0,
        kl_exponent=2.0,
        risk_bound=1.0,
        noise_seed=s,
    ),
    "proximal-point": lambda o, b, s: proximal_point(
        *(o, None, b),
        lipschitz=1.0,
        smoothness=1.0,
        weak_convexity=0.1,
        kl_gamma=1.0,
        kl_exponent=2.0,
        risk_bound=1.0,
        inner_steps=4,
        noise_seed=s,
    ),
}
Audit = Callable[[int, int], Finding]
AUDITS: dict[str, Audit] = {
    "dp-sgd": dp_sgd,
    "dp-sgd, sampled": lambda trials, seed: dp_sgd(
        trials, seed, sample_rate=0.01, steps=1000, noise=0.6
    ),
    "dp-ftrl, buffered Toeplitz": lambda trials, seed: dp_ftrl(
        trials, seed, noise="buffered-toeplitz"
    ),
    "dp-ftrl, Toeplitz": lambda trials, seed: dp_ftrl(trials, seed, noise="toeplitz"),
    "dp-ftrl, tree": lambda trials, seed: dp_ftrl(trials, seed, noise="tree"),
    "dp-ftrl, two passes": lambda trials, seed: dp_ftrl(trials, seed, noise="toeplitz", passes=2),
    "dp-ftrl, best": lambda trials, seed: dp_ftrl(trials, seed, noise="best"),
    "dp-ftrl, best, two passes": lambda trials, seed: dp_ftrl(trials, seed, noise="best", passes=2),
    "dp-ftrl, sampled by turns": dp_ftrl_by_turns,
    "dp-ftrl, every turn": lambda trials, seed: dp_ftrl_by_turns(trials, seed, rate=1.0),
    "dice-sgd": dice_sgd,
    "dice-sgd as published": dice_sgd_as_published,
    **{name: partial(solver, name) for name in SOLVERS},
    "adaptive-gd": adaptive,
    "adaptive-gd, norms": adaptive_norms,
    "accelerated-srgd": srgd,
    "quantile": low_quantile,
    **{
        name: partial(statistic, name)
        for name in ("scaler", "imputer", "class counts", "evaluation", "regression sums")
    },
}


def run_audits(
    names: Sequence[str],
    *,
    trials: int = RUNS,
    seed: int = 0,
    on_done: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """The named audits, in this order.

    Args:
        names: keys of `families.audits`.
        trials: of each attack's certifying half, about; thousands are needed to show most of a
            claim.
        seed: of coins and noise, so that a finding repeats.
        on_done: told each finding.

    Returns:
        one finding for each name.

    Examples:
        >>> from dpoptim.audit import run_audits
        >>> [finding] = run_audits(["dp-sgd"], trials=500)
        >>> finding.verdict == "REFUTED"
        False
    """
    from dpoptim.audit.families import audits  # which knows the registered methods, and these

    known, found = audits(), []
    for name in names:
        started = time.perf_counter()
        result = replace(known[name](trials, seed), method=name)
        found.append(replace(result, seconds=time.perf_counter() - started))
        if on_done is not None:
            on_done(found[-1])
    return found
