"""``dpoptim compare``: methods side by side at one guarantee, on public data."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from dpoptim.accounting.ledger import Ledger
from dpoptim.data import Data
from dpoptim.methods import WholeRun
from dpoptim.runs.command import planned_run
from dpoptim.runs.inputs import load_data
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.outcome import parameters_of
from dpoptim.runs.train import train_privately
from dpoptim.runs.train_solver import train_by_solver
from dpoptim.runs.train_without_privacy import comparison_epochs, train_without_privacy

WITHOUT_PRIVACY = "without privacy"


@dataclass(frozen=True)
class Compared:
    """How a method did.

    Attributes:
        method: its name, or `WITHOUT_PRIVACY`.
        guarantee: in words. scores: on the hold-out, one a seed. seconds: of training, the mean.
        measure: what the scores are: ``"accuracy"``, or ``"R2"`` where a number is predicted.
    """

    method: str
    guarantee: str
    scores: tuple[float, ...]
    seconds: float
    measure: str

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


def compare_methods(
    request: TrainRequest,
    methods: Sequence[str],
    *,
    seeds: int,
    on_done: Callable[[Compared], None],
) -> list[Compared]:
    """Train by each method at the guarantee of ``request``, and once without privacy; best first.

    Args:
        request: as for `run_training`; its method and ledger are not looked at.
        seeds: runs of each method; initialisation and noise differ, the data does not.
        on_done: told of each method as it is done.

    Raises:
        ValueError: the data is not public or has no hold-out, or an option that a method does not
            take.

    **Guarantee.** None: scores of many runs are shown, which only public data allows.
    """
    data = load_data(request)
    if not data.public or data.x_test is None:
        raise ValueError(
            "dpoptim compare shows scores of many runs: the data must be public (--data-is-public)."
        )
    found = []
    for method in methods:
        found.append(
            run_method(replace(request, method=method, ledger=None, budget=None), data, seeds)
        )
        on_done(found[-1])
    found.append(run_without_privacy(request, data, seeds))
    on_done(found[-1])
    return sorted(found, key=lambda each: -each.mean)


def run_method(request: TrainRequest, data: Data, seeds: int) -> Compared:
    def build() -> nn.Module:
        return build_model(request.model, data.x.shape[1:], data.outputs)

    plan, optimization = planned_run(request, data, None, parameters_of(build()))
    train = train_by_solver if isinstance(plan.method, WholeRun) else train_privately
    scores, seconds = [], []
    for seed in range(seeds):
        torch.manual_seed(request.seed + seed)
        noise_seed = None if request.noise_seed is None else request.noise_seed + seed
        trained = train(
            data,
            build(),
            plan,
            optimization,
            ledger=Ledger(None, neighboring=plan.neighboring),
            label="comparison",
            noise_seed=noise_seed,
            on_step=lambda _: None,
        )
        scores.append(trained.scores[-1])
        seconds.append(trained.seconds)
    return Compared(
        request.method,
        str(plan.guarantee),
        tuple(scores),
        statistics.fmean(seconds),
        measure_of(data),
    )


def run_without_privacy(request: TrainRequest, data: Data, seeds: int) -> Compared:
    scores = []
    started = time.perf_counter()
    for seed in range(seeds):
        torch.manual_seed(request.seed + seed)
        model = build_model(request.model, data.x.shape[1:], data.outputs)
        epochs = comparison_epochs(data)
        scores.append(
            train_without_privacy(data, model, epochs=epochs, seed=request.seed + seed)[-1]
        )
    seconds = (time.perf_counter() - started) / seeds
    return Compared(WITHOUT_PRIVACY, "none", tuple(scores), seconds, measure_of(data))


def measure_of(data: Data) -> str:
    return "accuracy" if data.target_bounds is None else "R2"


def to_json(found: Sequence[Compared]) -> str:
    """The comparison as a JSON document."""
    return (
        json.dumps(
            [{**asdict(each), "mean": each.mean, "spread": each.spread} for each in found], indent=2
        )
        + "\n"
    )
