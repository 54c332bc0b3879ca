"""``dpoptim tune``: settings of a linear model, chosen on public proxies for free, or privately."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.data import Data
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression
from dpoptim.estimators.linear_fit import MOMENTUM_SHARE
from dpoptim.files import make_folder, write_atomically
from dpoptim.runs.command import open_ledger
from dpoptim.runs.inputs import load_data
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.outcome import try_writing
from dpoptim.runs.plans import read_value, relation_kept
from dpoptim.runs.saved_model import save_model
from dpoptim.runs.train_solver import row_norm
from dpoptim.tuning import DPSearchCV
from dpoptim.tuning.public import Tried, tune_on_public

SHARES = (0.3, 1.0, 3.0)  # of the default clip norm, tried where no grid is given
STEPS = (10, 30, 100)


@dataclass(frozen=True)
class Tuned:
    """Result of a private search, and where it was written.

    Attributes:
        settings: of the winner. score: its noisy score. guarantee: of settings, score and model.
        data_name: of the records. reservation: the search's charge; None: in no ledger file.
    """

    settings: Mapping[str, Any]
    score: float
    measure: str
    guarantee: Guarantee
    folder: Path
    data_name: str
    reservation: str | None


def grid_of(texts: Sequence[str] | None, data: Data, estimator: Any) -> dict[str, list[Any]]:
    """Read NAME=VALUE,VALUE,... for each setting; by default usual clip norms, and steps.

    Raises:
        ValueError: no name, or no values.
    """
    if not texts:
        return {"clip_norm": [share * usual_clip(data) for share in SHARES], "steps": list(STEPS)}
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--grid takes NAME=VALUE,VALUE,..., got {text!r}.")
        grid[name.strip().replace("-", "_")] = [
            read_value(value.strip()) for value in values.split(",")
        ]
    known = estimator.get_params()
    if unknown := [name for name in grid if name not in known]:
        raise ValueError(f"--grid has no setting {unknown[0]!r}; there are {', '.join(known)}.")
    return grid


def usual_clip(data: Data) -> float:
    """The estimators' own clip norm, up to the factor of the loss."""
    return MOMENTUM_SHARE * math.hypot(row_norm(data), 1.0)


def estimator_for(data: Data, rows_per_person: int) -> Any:
    """A linear model with the public facts of the data: bounds, classes and their weights."""
    common: dict[str, Any] = {"data_norm": row_norm(data), "rows_per_person": rows_per_person}
    if data.target_bounds is not None:
        return DPLinearRegression(**common, target_bound=1.0)
    weights = None if data.class_weights is None else dict(enumerate(data.class_weights))
    return DPLogisticRegression(**common, classes=range(data.classes), class_weight=weights)


def flat_features(data: Data) -> Any:
    return data.x.reshape(len(data.x), -1)


def tune_publicly(
    request: TrainRequest, texts: Sequence[str] | None, *, n: int | None, seeds: int
) -> list[Tried]:
    """Rank settings on the public table that the request names; see `tune_on_public`."""
    data = load_data(request)
    assert data.x_test is not None  # public data has a hold-out
    assert data.y_test is not None
    assert request.epsilon is not None
    assert request.delta is not None
    estimator = estimator_for(data, request.records_per_person)
    return tune_on_public(
        estimator,
        grid_of(texts, data, estimator),
        (flat_features(data), data.y),
        (data.x_test.reshape(len(data.x_test), -1), data.y_test),
        persons=data.persons,
        epsilon=request.epsilon,
        delta=request.delta,
        n=n,
        seeds=seeds,
    )


def tune_privately(
    request: TrainRequest,
    texts: Sequence[str] | None,
    *,
    mean_trials: float,
    holdout: float,
    out: Path,
) -> Tuned:
    """Search on private records; write the winner's model and ``tune.json`` into ``out``.

    Raises:
        ValueError: an option; before anything is spent.
        BudgetExceeded: the ledger does not admit the search; nothing is drawn.

    **Guarantee.** ``guarantee``, that of `DPSearchCV`: the whole search is charged as one event
    before its first trial, however many lose.
    """
    data = load_data(request)
    assert request.epsilon is not None
    assert request.delta is not None
    relation = request.neighboring or relation_kept(request.ledger) or "zero-out"
    if relation == "add-or-remove-one":
        raise ValueError(
            "a private search divides records by their places, which add-or-remove-one does not "
            "keep. Fix: --neighboring zero-out, with a ledger that counts under it (dpoptim train "
            "takes it over from there)."
        )
    estimator = estimator_for(data, request.records_per_person).set_params(neighboring=relation)
    grid = grid_of(texts, data, estimator)
    make_folder(out)
    if any(out.iterdir()) and not request.overwrite:
        raise ValueError(f"--out {out} is not empty; name another folder, or allow --overwrite.")
    try_writing(out)
    with open_ledger(request, relation, data) as ledger:
        search = DPSearchCV(
            estimator,
            grid,
            epsilon=request.epsilon,
            delta=request.delta,
            mean_trials=mean_trials,
            holdout=holdout,
            ledger=ledger if ledger.durable else None,  # and then the guarantee says so
            noise_seed=request.noise_seed,
        ).fit(flat_features(data), data.y, persons=data.persons)
        charge = ledger.made[-1] if ledger.durable else None
    save_model(
        out / "model.pt", as_network(search.best_estimator_, data), "softmax", data, row_norm(data)
    )
    measure = "accuracy"
    if data.target_bounds is not None:  # as of targets scaled to [-1, 1]
        measure = "minus the squared error, of half the bounds' width as 1"
    tuned = Tuned(
        search.best_params_,
        search.best_score_,
        measure,
        search.privacy_,
        out,
        data.name,
        charge,
    )
    write_atomically(out / "tune.json", to_json(tuned))
    return tuned


def as_network(estimator: Any, data: Data) -> nn.Module:
    """The linear estimator as the command line's softmax model, which `dpoptim predict` reads."""
    network = build_model("softmax", data.x.shape[1:], data.outputs)
    layer = next(module for module in network.modules() if isinstance(module, nn.Linear))
    weight = torch.as_tensor(estimator.coef_, dtype=torch.float32).reshape(-1, layer.in_features)
    bias = torch.as_tensor(estimator.intercept_, dtype=torch.float32).reshape(-1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        layer.weight[-len(weight) :] = weight  # of two classes the first has score 0
        layer.bias[-len(bias) :] = bias
    return network


def to_json(tuned: Tuned) -> str:
    """The search's result as a JSON document."""
    document = {
        "settings": dict(tuned.settings),
        "score": tuned.score,
        "measure": tuned.measure,
        "guarantee": tuned.guarantee.to_json(),
        "data": tuned.data_name,
        "reservation": tuned.reservation,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
