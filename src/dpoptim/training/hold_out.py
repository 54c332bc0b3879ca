"""A network's scores on a private hold-out: what `PrivateTraining.evaluate` does."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.ledger_of_ranks import in_its_process
from dpoptim.evaluation.evaluate import ClassifierScores, evaluate_classifier
from dpoptim.evaluation.regressor import RegressorScores, evaluate_regressor
from dpoptim.noise.stream import KeyStream
from dpoptim.runtime.torch_internals import pytree
from dpoptim.statistics import Floats, ask_first
from dpoptim.target_range import TargetBound
from dpoptim.training.batches.user_code import Quiet, QuietCall
from dpoptim.training.randomness.generators import generators_in
from dpoptim.training.randomness.secret_randomness import secret_randomness

Collate = Callable[[list[Any]], Any]
Outputs = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
LABELS = "labels"


def evaluate_hold_out(
    model: nn.Module,
    hold_out: Dataset[Any],
    *,
    rows: Sequence[int],
    unit: str,
    collate: Collate,
    outputs: Outputs | None,
    epsilon: float,
    delta: float,
    neighboring: str,
    n: int | None,
    target_bound: TargetBound | None,
    confidence: float,
    ledger: Ledger,
    noise_seed: int | None,
) -> ClassifierScores | RegressorScores:
    """Score a model of classes or of a number on private records; as `PrivateTraining.evaluate`.

    Of several processes each runs the model, whose parts may lie in all of them, and the first one
    scores what it found itself.

    Args:
        rows: of the hold-out that count, one of each unit. unit: what the guarantee protects.

    **Guarantee.** As for `evaluate_classifier` and `evaluate_regressor`: each record goes through
    the model alone, so that no record's score depends on another, and one process releases. What
    model, data and collate function draw at random meanwhile comes from secret seeds, but for
    ``noise_seed``: by a public one, a record more would shift the numbers of all that follow.
    """
    if not len(rows):
        raise ValueError("hold_out holds no records; give a data set with some.")
    ask_first(ledger, epsilon=epsilon, delta=delta, neighboring=neighboring)
    own = generators_in(model, hold_out, collate, outputs)
    with secret_randomness(KeyStream(), own) if noise_seed is None else nullcontext():
        found, targets = outputs_alone(model, hold_out, rows, collate, outputs or outputs_by_labels)
    if found.shape[1] == 1 and target_bound is None:
        raise ValueError(
            "target_bound is missing: the model has one output, a number. Fix: a public bound "
            "on the targets' absolute values."
        )

    def score(own: Ledger) -> ClassifierScores | RegressorScores:
        common: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "confidence": confidence,
            "neighboring": neighboring,
            "n": n,
            "ledger": own,
            "records": "hold-out",
            "noise_seed": noise_seed,
        }
        if found.shape[1] == 1:
            assert target_bound is not None
            return evaluate_regressor(found[:, 0], targets, target_bound=target_bound, **common)
        with np.errstate(all="ignore"):  # outputs that are not finite add nothing
            raised = np.exp(found - found.max(1, keepdims=True))
            chances = raised / raised.sum(1, keepdims=True)
        return evaluate_classifier(chances, targets, classes=range(found.shape[1]), **common)

    scores = in_its_process(ledger, score)
    return replace(scores, guarantee=replace(scores.guarantee, unit=unit))


def outputs_alone(
    model: nn.Module,
    hold_out: Dataset[Any],
    rows: Sequence[int],
    collate: Collate,
    outputs: Outputs,
) -> tuple[Floats, Floats]:
    """Outputs for each record by itself, (records, outputs), and the targets; private."""
    device = next(model.parameters()).device
    hold_out, collate = Quiet(hold_out), QuietCall(collate, "collate_fn")
    was = [(module, module.training) for module in model.modules()]
    found, targets = [], []
    model.eval()
    try:
        with torch.no_grad():
            for row in rows:
                batch = pytree.tree_map(
                    lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
                    collate([hold_out[row]]),
                )
                output, target = outputs(model, batch)
                if not isinstance(target, Tensor) or target.numel() != 1:
                    raise ValueError(
                        "a target of hold_out is not one number: scores are of one class or number "
                        "a record. Fix: outputs=, which returns a record's outputs and its target."
                    )
                found.append(output.reshape(-1).double().cpu().numpy())
                targets.append(float(target.reshape(())))
    finally:
        for module, training in was:
            module.training = training
    return np.stack(found), np.array(targets)


def outputs_by_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A model's outputs for a batch, and the target: its last entry, or its "labels"."""
    if isinstance(batch, Mapping):
        if LABELS not in batch:
            raise ValueError(
                "hold_out's records are dictionaries without 'labels'. Fix: outputs=, a function "
                "of the model and a batch of one record that returns its outputs and its target."
            )
        returned = model(**{name: value for name, value in batch.items() if name != LABELS})
        target = batch[LABELS]
    else:
        *inputs, target = batch
        returned = model(*inputs)
    first: Tensor = returned[0] if isinstance(returned, tuple) else returned
    output: Tensor = returned.logits if hasattr(returned, "logits") else first
    return output, target
