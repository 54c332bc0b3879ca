"""The solvers of Menart et al. 2024 and DP-SGD on public data at one guarantee (zero-out).

Each method gets one setting for each data set, chosen from a short list by the empirical risk at
epsilon = 1 (the data are public; on private data that choice would have to be paid for). Then all
methods run at all epsilons with other seeds.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.gate import Gate
from dpoptim.methods import DPSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.reproduce.real_cases import Case, breast_cancer, fashion, tweets
from dpoptim.reproduce.results import write_rows
from dpoptim.solvers import (
    Budget,
    Result,
    adaptive_gd,
    kl_spider,
    noisy_gd,
    proximal_point,
    select_stationary,
)

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0)


Settings = Mapping[str, float]


Method = Callable[[Case, float, int, Settings], Tensor]


def dp_sgd(
    case: Case, epsilon: float, seed: int, settings: Settings, smoothing: Tensor | None = None
) -> Tensor:
    """DP-SGD in closed form: Poisson batches, momentum 0.9, the library's plan, coins and gate.

    A public matrix ``smoothing``, symmetric and positive definite, of shape (columns, columns),
    multiplies the released gradients (outputs, columns): post-processing, so free.

    Returns the last iterate, or the mean of the share ``averaged`` of the last ones.
    """
    batch_size = min(int(settings["batch_size"]), len(case.x))
    clip = settings["lipschitz"]
    plan = DPSGD(clip_norm=clip).plan(
        n=len(case.x),
        batch_size=batch_size,
        epochs=settings["epochs"],
        epsilon=epsilon,
        delta=DELTA,
        neighboring="zero-out",
    )
    coins, noise = (KeyStream.from_seed(seed, purpose) for purpose in ("coins", "noise"))
    w = case.problem.initial()
    velocity = torch.zeros_like(w)
    first_averaged = round(plan.steps * (1 - settings.get("averaged", 0.0)))
    mean = torch.zeros_like(w)
    with Ledger(neighboring="zero-out") as ledger:
        gate = Gate(
            event=plan.event,
            neighboring="zero-out",
            query=plan.query,
            releases=plan.steps,
            ledger=ledger,
            noise=noise,
            label="comparison",
        )
        norms = case.model.squared_row_norms(case.x)
        for step, indices in enumerate(
            islice(plan.sampler.batches(coins, len(case.x)), plan.steps)
        ):
            rows = torch.from_numpy(indices)
            total = case.model.clipped_sum(
                case.x.index_select(0, rows),
                case.y[rows],
                [(1.0, w)],
                clip,
                capacity=plan.sampler.capacity(plan.n),
                squared_row_norms=norms[rows],
            )
            (released,) = gate.release_sum([total])
            if smoothing is not None:
                released = (released.view(case.model.outputs, -1) @ smoothing).view(-1)
            velocity = 0.9 * velocity + released / batch_size + case.problem.penalty_gradient(w)
            w = w - settings["learning_rate"] * velocity
            if step >= first_averaged:
                mean += w / (plan.steps - first_averaged)
    return mean if first_averaged < plan.steps else w


def solver_method(solver: Callable[..., Result]) -> Method:
    """A solver as a method of the comparison; its settings are its arguments."""

    def method(case: Case, epsilon: float, seed: int, settings: Settings) -> Tensor:
        known = (
            {"risk_bound": math.log(max(case.model.outputs, 2))} if "kl_gamma" in settings else {}
        )
        budget = Budget(delta=DELTA, epsilon=epsilon)
        return solver(case.objective, None, budget, noise_seed=seed, **known, **settings).weights

    return method


def candidates(**lists: Sequence[float]) -> list[dict[str, float]]:
    """Settings that take the i-th value of every list; shorter lists repeat."""
    longest = max(map(len, lists.values()))
    return [
        {name: values[i % len(values)] for name, values in lists.items()} for i in range(longest)
    ]


SPIDER = candidates(
    lipschitz=[1, 1, 3, 3], kl_gamma=[4, 2, 4, 8], rounds=[100, 50, 100, 100], smoothness=[1]
)
METHODS: dict[str, tuple[Method, list[dict[str, float]]]] = {
    "DP-SGD": (
        dp_sgd,
        candidates(
            lipschitz=[1, 1, 1, 3], learning_rate=[0.1, 0.5, 2, 0.2], batch_size=[4096], epochs=[40]
        ),
    ),
    "noisy GD": (
        solver_method(noisy_gd),
        candidates(lipschitz=[1, 1, 3, 3], step_size=[1, 2, 0.5, 0.5], steps=[50, 100, 100, 300]),
    ),
    # with so few rounds it takes nearly the same steps for every exponent
    **{
        f"KL-Spider, kappa = {exponent:g}": (
            solver_method(kl_spider),
            [{**settings, "kl_exponent": exponent} for settings in SPIDER],
        )
        for exponent in (2.0, 1.5)
    },
    "proximal point": (
        solver_method(proximal_point),
        candidates(
            lipschitz=[1, 1, 3, 3],
            weak_convexity=[0.01, 0.1, 0.1, 1],
            smoothness=[1, 1, 3, 3],
            kl_gamma=[1],
            kl_exponent=[2],
            inner_steps=[8],
        ),
    ),
    "adaptive GD": (
        solver_method(partial(adaptive_gd, last_steps=0)),  # the paper's
        candidates(lipschitz=[1, 1, 3, 3], smoothness=[0.25, 1, 2, 4], max_steps=[300]),
    ),
    "stationary point": (
        solver_method(select_stationary),
        candidates(lipschitz=[1, 3], smoothness=[0.25, 2], max_steps=[300]),
    ),
}


@dataclass(frozen=True)
class Row:
    """Mean over seeds of one method at one epsilon."""

    data: str
    method: str
    epsilon: float
    seeds: int
    excess_risk: float
    excess_risk_spread: float  # largest minus smallest over the seeds
    test_accuracy: float  # percent
    cpu_seconds: float  # of one run
    settings: str


def kl_real(
    out: Path,
    quick: bool,
    fashion_directory: Path | str = FASHION_MNIST_DIRECTORY,
    tweets_directory: Path | str | None = None,
) -> list[Row]:
    """Compare all methods; write ``kl_real.csv`` to the folder ``out``.

    Args:
        out: a folder, made if it does not exist.
        quick: breast cancer only, one seed.
        fashion_directory: where Fashion-MNIST's files are; its two rows are left out where there
            are none.
        tweets_directory: a folder of TweetEval; see `load_tweets`.
    """
    cases = [breast_cancer()]
    directory = Path(fashion_directory)
    if tweets_directory is not None:
        cases.append(tweets(Path(tweets_directory), out / "cache"))
    if not quick and directory.is_dir():
        cases += [fashion(directory, (0, 6)), fashion(directory)]
    rows: list[Row] = []
    for case in cases:
        rows += compare(case, seeds=1 if quick else 3)
        write_rows(out / "kl_real.csv", Row, rows)  # a long comparison: keep what there is
    return rows


def compare(case: Case, seeds: int) -> list[Row]:
    """Every method on a data set, at its best setting at epsilon 1 (by seed 0, used once)."""
    rows = []
    for name, (method, choices) in METHODS.items():
        risks = [case.excess_risk(method(case, 1.0, 0, settings)) for settings in choices]
        settings = choices[int(np.argmin(risks))]
        for epsilon in EPSILONS:
            started = time.process_time()
            found = [method(case, epsilon, seed, settings) for seed in range(1, seeds + 1)]
            seconds = (time.process_time() - started) / seeds
            excess = [case.excess_risk(w) for w in found]
            accuracy = float(np.mean([case.accuracy(w) for w in found]))
            rows.append(
                Row(
                    case.name,
                    name,
                    epsilon,
                    seeds,
                    float(np.mean(excess)),
                    max(excess) - min(excess),
                    accuracy,
                    seconds,
                    " ".join(f"{key}={value:g}" for key, value in settings.items()),
                )
            )
    return rows
