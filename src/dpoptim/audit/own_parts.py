"""Rules and states of other code, run on adversarial records with the noise off.

The attack by canaries shows what a record adds where each has a coordinate of its own. A rule may
keep its bound there, and break it for gradients of other norms, or in a network of several layers.
So the parts are also run on a small network, with one record there or not, and what the gate would
release moves by at most the norm bound: there are no statistics here.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.audit.finding import Finding
from dpoptim.audit.sensitivity import KINDS, Batch, SensitivityResult, distort, joint_distance
from dpoptim.audit.small_runs import linear_of_zeros
from dpoptim.distributed.ranks import ALONE
from dpoptim.gradients.engine import Engine
from dpoptim.methods import TrainingMethod
from dpoptim.methods.sensitive_state import FixedClipNorm, NothingKept
from dpoptim.origins import of_this_library
from dpoptim.plan import Plan

RECORDS = 8
SCALES = (1e-3, 0.1, 1.0, 10.0, 1e3)  # of losses: norms below, at and above any usual clip norm


def of_others(plan: Plan) -> bool:
    """Whether the method, or its rule, is not this library's own."""
    kinds = (type(plan.method), type(plan.method.rule))
    return not all(map(of_this_library, kinds))


def network() -> nn.Module:
    """Two layers, so that a rule may bound each by itself; always the same."""
    layers = linear_of_zeros(5, 4, bias=True), linear_of_zeros(4, 2, bias=True)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1]).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(spread(p.numel()).view_as(p) / 2)
    return model


def spread(count: int) -> Tensor:
    """So many different numbers in [-1, 1]."""
    return torch.sin(1.7 * torch.arange(1, count + 1, dtype=torch.float64))


def first_query(plan: Plan, model: nn.Module, batch: Batch, scale: float) -> list[Tensor]:
    """Return the first step's request to the gate on these records; see `training.steps`."""
    method = plan.method
    assert isinstance(method, TrainingMethod)
    adaptive = method.adaptive_clip_norm(plan)
    engine = Engine(model, method.rule, capacity=RECORDS, reduction="sum")
    clip_norm, state = adaptive or FixedClipNorm(method.rule), method.sensitive_state(plan)
    state = state or NothingKept()
    state.attach(partial(engine.totals.by_unit, engine.clipping.units(engine.layers)), ALONE)
    clip_norm.meet(ALONE)
    entries = [p.numel() for p in engine.parameters]
    clip_norm.see(entries, engine.totals.own_views, plan.query.released_deviation)
    engine.clipping = clip_norm.rule
    if adaptive is not None:
        engine.observer = adaptive.observe
    engine.attach()
    try:
        x, y = batch
        engine.begin_microbatch(len(x))
        (scale * F.cross_entropy(model(x), y, reduction="sum")).backward()
        engine.require_all_closed()
        sums = clip_norm.scaled(engine.take_sums())
        query = state.query(sums) if clip_norm.found else sums[0]
        return [each.clone() for each in clip_norm.query(query)]
    finally:
        engine.detach()
        for p in engine.parameters:
            p.grad = None


def audit_query(plan: Plan, *, seed: int = 0, kinds: Sequence[str] = KINDS) -> SensitivityResult:
    """Take one record away, plain and distorted, and measure how the first query moves.

    Args:
        plan: of a method that trains step by step; its noise stays off.
        seed: of distorted records. kinds: what is done to the record; see `audit_sensitivity`.

    Returns:
        the largest move over the method's norm bound, with a verdict.
    """
    generator = torch.Generator().manual_seed(seed)
    x = spread(RECORDS * 5).view(RECORDS, 5)
    y = torch.arange(RECORDS) % 2
    model, bound = network(), plan.method.norm_bound
    largest, worst, trials = 0.0, "none", 0
    for scale in SCALES:
        for kind in kinds:
            whole = (distort(x, RECORDS - 1, kind, generator), y)
            less = tuple(part[:-1] for part in whole)
            asked = (first_query(plan, model, batch, scale) for batch in (whole, less))
            ratio, trials = joint_distance(*asked) / bound, trials + 1
            if ratio > largest:
                largest, worst = ratio, f"{kind} record, its loss times {scale:g}"
    return SensitivityResult(largest, worst, trials, tolerance=0.0)


def with_own_parts(found: Finding, plan: Plan, seed: int) -> Finding:
    """The finding of an attack, with what parts of other code did with the noise off.

    A record that moves the first query by more than the norm bound refutes the claim. What cannot
    be run so, or was left out of the attack, is named.
    """
    if not of_others(plan) or not isinstance(plan.method, TrainingMethod):
        return found
    notes = list(found.notes)
    if plan.method.policy is not None:
        notes.append("not attacked: its clip norm after the first step")
    try:
        result = audit_query(plan, seed=seed)
    except Exception as error:  # whatever foreign code raises on a network that it does not expect
        notes.append(
            "not attacked: its rule and state on adversarial records "
            f"({type(error).__name__} on a small network)"
        )
        return replace(found, notes=tuple(notes))
    if result.verdict == "consistent":
        return replace(found, notes=tuple(notes))
    moved = (
        f"with the noise off, one record moves the first step's release by "
        f"{result.largest_ratio:.3g} norm bounds ({result.worst})"
    )
    return replace(found, verdict="refuted", trials_needed=0, notes=(moved, *notes))
