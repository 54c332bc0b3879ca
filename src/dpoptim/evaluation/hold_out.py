"""A network's scores on a private hold-out: what `PrivateTraining.evaluate` does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from dpoptim.accounting.ledger import Ledger
from dpoptim.evaluation.evaluate import ClassifierScores, evaluate_classifier
from dpoptim.evaluation.regressor import RegressorScores, evaluate_regressor
from dpoptim.statistics import Floats, ask_first
from dpoptim.target_range import TargetBound


def evaluate_hold_out(
    model: nn.Module,
    hold_out: Dataset[Any],
    *,
    epsilon: float,
    delta: float,
    neighboring: str,
    n: int | None,
    target_bound: TargetBound | None,
    persons: Sequence[Any] | None,
    confidence: float,
    ledger: Ledger | None,
    noise_seed: int | None,
) -> ClassifierScores | RegressorScores:
    """Score a model of classes or of a number on private records; as `PrivateTraining.evaluate`.

    **Guarantee.** As for `evaluate_classifier` and `evaluate_regressor`: each record goes through
    the model alone, so that no record's score depends on another. With ``persons``, only the first
    record of each person counts, and the guarantee is per person.
    """
    counting = range(len(hold_out)) if persons is None else first_rows(persons, len(hold_out))  # type: ignore[arg-type]
    if not len(counting):
        raise ValueError("hold_out holds no records; give a data set with some.")
    unit = "record" if persons is None else "person"
    ledger = None if ledger is None else ledger.of_units(unit)
    ask_first(ledger, epsilon=epsilon, delta=delta, neighboring=neighboring)
    outputs, targets = outputs_alone(model, hold_out, counting)
    common: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "confidence": confidence,
        "neighboring": neighboring,
        "n": n,
        "ledger": ledger,
        "noise_seed": noise_seed,
    }
    width = outputs.shape[1]
    scores: ClassifierScores | RegressorScores
    if width == 1:
        if target_bound is None:
            raise ValueError(
                "target_bound is missing: the model has one output, a number. Fix: a public bound "
                "on the targets' absolute values."
            )
        scores = evaluate_regressor(outputs[:, 0], targets, target_bound=target_bound, **common)
    else:
        with np.errstate(all="ignore"):  # outputs that are not finite add nothing
            raised = np.exp(outputs - outputs.max(1, keepdims=True))
            chances = raised / raised.sum(1, keepdims=True)
        scores = evaluate_classifier(chances, targets, classes=range(width), **common)
    return replace(scores, guarantee=replace(scores.guarantee, unit=unit))


def first_rows(persons: Sequence[Any], items: int) -> list[int]:
    """The first row of each person."""
    if len(persons) != items:
        raise ValueError("persons must name the owner of each record of hold_out, one for each.")
    first: dict[Any, int] = {}
    for row, person in enumerate(persons):
        first.setdefault(person, row)
    return list(first.values())


def outputs_alone(
    model: nn.Module, hold_out: Dataset[Any], rows: Sequence[int]
) -> tuple[Floats, Floats]:
    """Outputs for each record by itself, (records, outputs), and the targets; private."""
    device = next(model.parameters()).device
    was = [(module, module.training) for module in model.modules()]
    outputs, targets = [], []
    model.eval()
    try:
        with torch.no_grad():
            for row in rows:
                *inputs, target = default_collate([hold_out[row]])
                found: Tensor = model(*(each.to(device) for each in inputs))
                outputs.append(found.reshape(-1).double().cpu().numpy())
                targets.append(float(target.reshape(())))
    finally:
        for module, training in was:
            module.training = training
    return np.stack(outputs), np.array(targets)
