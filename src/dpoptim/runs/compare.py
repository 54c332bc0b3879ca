"""``dpoptim compare``: methods side by side at one guarantee, on public data."""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import proportion, real_number, whole_number
from dpoptim.data import Data
from dpoptim.methods import WholeRun
from dpoptim.plan import Plan
from dpoptim.registry import method_names
from dpoptim.runs.command import planned_run
from dpoptim.runs.inputs import load_data
from dpoptim.runs.models import build_model
from dpoptim.runs.options import Relation, TrainRequest
from dpoptim.runs.outcome import parameters_of
from dpoptim.runs.plans import read_setting
from dpoptim.runs.train import Optimization, package_versions, train_privately
from dpoptim.runs.train_solver import train_by_solver
from dpoptim.runs.train_without_privacy import comparison_epochs, train_without_privacy

WITHOUT_PRIVACY = "without privacy"
COMMON_RELATION: Relation = "zero-out"  # all methods have it
# Options of `dpoptim train` that a method may be given by itself, and what refuses wrong ones.
# None has the name of a setting that `--set` takes.
OWN: dict[str, Callable[[str, Any], Any]] = {
    "clip_norm": real_number,
    "clip_quantile": proportion,
    "clipping": lambda name, value: str(value),
    "learning_rate": real_number,
    "optimizer": lambda name, value: str(value),
    "batch_size": lambda name, value: whole_number(name, value, least=1),
    "epochs": real_number,
    "projection": real_number,
}


@dataclass(frozen=True)
class Compared:
    """How a method did.

    Attributes:
        method: its name and settings as given, or `WITHOUT_PRIVACY`.
        guarantee: in words. scores: on the hold-out, one a seed. seconds: of training, the mean.
        measure: what the scores are: ``"accuracy"``, or ``"R2"`` where a number is predicted.
        hold_out: its number of records.
        plan: as `Plan.to_json` has it. settings: of the optimizer, for people.
    """

    method: str
    guarantee: str
    scores: tuple[float, ...]
    seconds: float
    measure: str
    hold_out: int
    plan: Any = None
    settings: str = ""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0

    @property
    def hold_out_error(self) -> float | None:
        """The standard error of an accuracy, for the records that the hold-out happens to have."""
        if self.measure != "accuracy":
            return None
        return math.sqrt(self.mean * (1 - self.mean) / self.hold_out)


def compare_methods(
    request: TrainRequest,
    methods: Sequence[str],
    *,
    seeds: int,
    on_done: Callable[[Compared], None],
) -> list[Compared]:
    """Train by each method at the guarantee of ``request``, and once without privacy; best first.

    All have one neighbouring relation: that of ``request``; else the default, if it is the same for
    all, and `COMMON_RELATION` if not.

    Args:
        request: as for `run_training`; its method and ledger are not looked at.
        methods: each a name, and settings of its own after colons: see `request_of`.
        seeds: runs of each method; initialisation and noise differ, the data does not.
        on_done: told of each method as it is done.

    Raises:
        ValueError: the data is not public or has no hold-out, or an option that a method does not
            take.

    **Guarantee.** None: scores of many runs are shown, which only public data allows.
    """
    requests = {words: request_of(request, words) for words in methods}
    data = load_data(request)
    if not data.public or data.x_test is None:
        raise ValueError(
            "dpoptim compare shows scores of many runs: the data must be public (--data-is-public)."
        )
    relations = {planned_method(each, data)[0].neighboring for each in requests.values()}
    if len(relations) > 1:
        requests = {
            words: replace(each, neighboring=COMMON_RELATION) for words, each in requests.items()
        }
    found = []
    for words, each in requests.items():
        found.append(replace(run_method(each, data, seeds), method=words))
        on_done(found[-1])
    found.append(run_without_privacy(request, data, seeds))
    on_done(found[-1])
    return sorted(found, key=lambda each: -each.mean)


def request_of(request: TrainRequest, words: str) -> TrainRequest:
    """The request of one method, from ``METHOD:name=value:name=value``.

    Args:
        words: values as --set takes them; names of `OWN` are options, others the method's settings.

    Raises:
        ValueError: there is no such method, or a value is out of range.
    """
    method, *texts = words.split(":")
    if method not in method_names():
        raise ValueError(f"no method {method!r}; there are {', '.join(method_names())}.")
    pairs = dict(map(read_setting, texts))
    own = {name: OWN[name](name, value) for name, value in pairs.items() if name in OWN}
    rest = [text for text in texts if read_setting(text)[0] not in OWN]
    return replace(request, method=method, setting=rest, ledger=None, budget=None, **own)


def made_model(request: TrainRequest, data: Data) -> nn.Module:
    return build_model(request.model, data.x.shape[1:], data.outputs)


def planned_method(request: TrainRequest, data: Data) -> tuple[Plan, Optimization]:
    return planned_run(request, data, None, parameters_of(made_model(request, data)))


def run_method(request: TrainRequest, data: Data, seeds: int) -> Compared:
    """Train by one method, once a seed."""
    plan, optimization = planned_method(request, data)
    train = train_by_solver if isinstance(plan.method, WholeRun) else train_privately
    scores, seconds = [], []
    for seed in range(seeds):
        torch.manual_seed(request.seed + seed)
        noise_seed = None if request.noise_seed is None else request.noise_seed + seed
        trained = train(
            data,
            made_model(request, data),
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
        hold_out_of(data),
        json.loads(plan.to_json()),
        ""
        if isinstance(plan.method, WholeRun)
        else f"{optimization.optimizer}, learning rate {optimization.rate_in_words(plan)}",
    )


def run_without_privacy(request: TrainRequest, data: Data, seeds: int) -> Compared:
    scores = []
    started = time.perf_counter()
    for seed in range(seeds):
        torch.manual_seed(request.seed + seed)
        model = made_model(request, data)
        epochs = comparison_epochs(data)
        scores.append(
            train_without_privacy(data, model, epochs=epochs, seed=request.seed + seed)[-1]
        )
    seconds = (time.perf_counter() - started) / seeds
    measure, hold_out = measure_of(data), hold_out_of(data)
    return Compared(WITHOUT_PRIVACY, "none", tuple(scores), seconds, measure, hold_out)


def hold_out_of(data: Data) -> int:
    return 0 if data.y_test is None else len(data.y_test)


def measure_of(data: Data) -> str:
    return "accuracy" if data.target_bounds is None else "R2"


def not_told_apart(found: Sequence[Compared]) -> list[str]:
    """The best private method, and those within twice its accuracy's standard error; if any."""
    best, *others = (each for each in found if each.method != WITHOUT_PRIVACY)
    error = 2 * (best.hold_out_error or 0.0)
    close = [each.method for each in others if best.mean - each.mean <= error]
    return [best.method, *close] if error and close else []


def to_json(found: Sequence[Compared], request: TrainRequest) -> str:
    """The comparison as a JSON document: on what, by which plans and versions, and the scores."""
    document = {
        "data": str(request.data),
        "model": request.model,
        "hold_out_records": found[0].hold_out,
        "measure": found[0].measure,
        "seed": request.seed,
        "noise_seed": request.noise_seed,
        "versions": package_versions(),
        "methods": [
            {
                **asdict(each),
                "mean": each.mean,
                "spread": each.spread,
                "hold_out_error": each.hold_out_error,
            }
            for each in found
        ],
    }
    return json.dumps(document, indent=2) + "\n"
