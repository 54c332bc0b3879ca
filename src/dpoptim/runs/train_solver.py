"""Train the softmax model by a whole-run solver, in closed form."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.accounting.guarantee import SEEDED, Guarantee, neighbours_differ_by
from dpoptim.accounting.ledger import Ledger
from dpoptim.assumptions import Assumption, enforced
from dpoptim.data import Data, Schema
from dpoptim.distributed.agreement import digest
from dpoptim.distributed.ranks import Ranks
from dpoptim.estimators.linear_fit import CLIPPED_SHARE, SQUARED_SHARE
from dpoptim.estimators.persons import CHOSEN, of_persons
from dpoptim.estimators.shards import all_ranks, equal_part, sample_of
from dpoptim.estimators.solving import SINGLE_PASS, solve
from dpoptim.estimators.table import clip_rows
from dpoptim.estimators.target_spread import (
    SHARE,
    WHOLE,
    can_be_narrowed,
    price_of_round,
    solve_in_part,
)
from dpoptim.estimators.weights import parts_of_data
from dpoptim.methods import WholeRun
from dpoptim.plan import Plan
from dpoptim.runs.assumptions import basis_of_run
from dpoptim.runs.train import Optimization, Trained, public_hold_out, score
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel, Loss
from dpoptim.target_range import TargetRange
from dpoptim.training.assumptions import basis_of_ledger
from dpoptim.training.batches.persons_of_ranks import one_rank_a_person
from dpoptim.training.batches.privacy_units import Persons

FIND_RANGE = "find_range"  # a setting: learn in the part of their range that targets take up
RANGE_FOUND = enforced(
    f"up to {SHARE:.0%} of the budget's mu^2 finds the range of targets, by sums to which a record "
    "adds at most sqrt(5)/2"
)


def row_norm(data: Data) -> float:
    """A public bound on the norm of a record, to which it is clipped.

    A schema says it; other features lie within about +-0.6, so it is half the root of their number.
    """
    if isinstance(data.encoding, Schema) and data.encoding.row_norm is not None:
        return data.encoding.row_norm
    return max(1.0, 0.5 * math.sqrt(math.prod(data.x.shape[1:])))


def solver_clip(data: Data) -> float:
    """The default clip norm: a share of the largest gradient of records of that norm."""
    if data.target_bounds is not None:
        return SQUARED_SHARE * math.hypot(row_norm(data), 1)
    return CLIPPED_SHARE * math.sqrt(2) * math.hypot(row_norm(data), 1)


def train_by_solver(
    data: Data,
    model: nn.Module,
    plan: Plan,
    optimization: Optimization,
    *,
    ledger: Ledger,
    label: str,
    noise_seed: int | None,
    on_step: Callable[[int], None],
) -> Trained:
    """Train a softmax model (``Flatten``, one ``Linear``) by ``plan.method``: `train_privately`.

    **Guarantee.** ``guarantee``, for every table; records are clipped to a public norm one by one.
    """
    method = plan.method
    assert isinstance(method, WholeRun)
    refuse_for(method, plan, data)
    started = time.perf_counter()
    rows = clip_rows(data.x.reshape(len(data.x), -1), row_norm(data))
    loss: Loss = "softmax" if data.target_bounds is None else "squared"
    linear = LinearModel(loss, rows.shape[1], outputs=data.outputs)
    options = dict(method.options)
    narrowed = options.pop(FIND_RANGE, False)
    weights = None if data.class_weights is None else np.array(data.class_weights)[data.y]
    y = data.y if loss == "softmax" else data.y.astype(np.float64)
    table = (rows, y) if weights is None else (rows, y, weights)
    owners = None
    if data.persons is not None:
        owners = Persons.of(data.persons, len(rows), plan.unit.most_rows)
    with all_ranks() as ranks:
        ranks.agree({"plan": digest(plan.to_json()), "data set": sample_of(rows, data.y)})
        one_rank_a_person(ranks, owners, sharded=False)
        own = (
            tuple(equal_part(part, ranks) for part in table)
            if owners is None
            else parts_of_data(
                *of_persons(
                    owners,
                    (rows, y, weights, None),
                    ranks,
                    sharded=False,
                    noise_seed=noise_seed,
                    in_order=method.solver in SINGLE_PASS,
                    neighboring=plan.neighboring,
                )
            )
        )
        run = partial(
            solve,
            method.solver,
            linear,
            radius=math.hypot(row_norm(data), 1),
            clip_norm=method.clip_norm,
            l2=options.pop("l2", 0.0),
            steps=options.pop("steps", None),
            step_size=options.pop("step_size", None),
            options=options,
            start=None,
            neighboring=plan.neighboring,
            label=label,
            noise_seed=noise_seed,
        )
        budget = Budget(
            delta=plan.delta, mu=neighbours_differ_by(plan.neighboring) / plan.noise_multiplier
        )
        found, guarantee, part = in_range(
            run,
            own,
            budget,
            narrowed=narrowed,
            n=plan.n,
            neighboring=plan.neighboring,
            ledger=ledger,
            noise_seed=noise_seed,
            ranks=ranks,
            label=label,
        )
        found, reservation = ranks.from_first(lambda: (found, ledger.made[-1]))
    matrix = found.view(linear.outputs, linear.columns).to(torch.float32)
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        layer.weight.copy_(matrix[:, :-1] * part.half)
        layer.bias.copy_(matrix[:, -1] * part.half + part.middle)
    on_step(1)
    hold_out = public_hold_out(data)
    lines = {
        RANGE_FOUND: narrowed,
        enforced(CHOSEN.format(plan.unit.most_rows)): owners is not None,
        Assumption("unproven", f"{SEEDED}: whoever knows the seed sees the data"): noise_seed
        is not None,
    }
    others = tuple(line for line, holds in lines.items() if holds)
    return Trained(
        model=model,
        guarantee=replace(guarantee, unit=plan.unit.name),
        basis=basis_of_run(
            (*plan.basis, *basis_of_ledger(ledger.durable), *others),
            data,
        ),
        reservation=reservation,
        scores=()
        if hold_out is None
        else (score(model, clip_like(hold_out[0], data), hold_out[1]),),
        seconds=time.perf_counter() - started,
    )


def in_range(
    run: Callable[..., tuple[torch.Tensor, Guarantee]],
    data: tuple[Any, ...],
    budget: Budget,
    *,
    narrowed: bool,
    n: int,
    neighboring: str,
    ledger: Ledger,
    noise_seed: int | None,
    ranks: Ranks,
    label: str,
) -> tuple[torch.Tensor, Guarantee, TargetRange]:
    """Weights, what they cost, and the part of their range that targets are learnt in.

    Args:
        narrowed: whether to find it; public numbers say whether noise would hide it.

    **Guarantee.** The budget's; see `solve_in_part`.
    """
    if narrowed and can_be_narrowed(price_of_round(budget.gdp), n, neighboring):
        return solve_in_part(
            run,
            data,
            budget,
            intercept=True,
            neighboring=neighboring,
            ledger=ledger,
            noise_seed=noise_seed,
            ranks=ranks,
            label=label,
        )
    weights, guarantee = run(data=data, budget=budget, ledger=ledger, ranks=ranks)
    return weights, guarantee, WHOLE


def refuse_for(method: WholeRun, plan: Plan, data: Data) -> None:
    """Refuse a plan and data that the solver is not for; a ValueError, by option."""
    if plan.noise_multiplier == 0:
        raise ValueError(
            f"--method {method.solver} without noise is not available; use --method dp-sgd."
        )
    find = method.options.get(FIND_RANGE, False)
    if find not in (True, False) or (find and data.target_bounds is None):
        raise ValueError(
            f"--set {FIND_RANGE} takes true or false, and is for numbers to predict; leave it out."
        )
    if method.solver == "sufficient-statistics" and data.target_bounds is None:
        raise ValueError(
            "--method sufficient-statistics predicts numbers. Fix: --task regression with "
            "--target-bounds or a schema, or --method momentum-gd."
        )


def clip_like(x: torch.Tensor, data: Data) -> torch.Tensor:
    """Test records as the training saw its own."""
    flat = clip_rows(x.numpy().reshape(len(x), -1), row_norm(data))
    return torch.from_numpy(np.ascontiguousarray(flat)).view(x.shape)
