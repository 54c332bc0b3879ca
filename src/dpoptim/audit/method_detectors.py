"""Detectors for methods and iterates beyond DP-SGD, as in `detectors`; exact: no false alarms."""

import math
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.audit.error_feedback import released_means
from dpoptim.audit.finding import refuted_by
from dpoptim.audit.named_audits import AUDITS
from dpoptim.audit.small_runs import linear_of_zeros, parameters_of
from dpoptim.clipping import Clipping, Style
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.value_clipping.value_engine import ValueEngine
from dpoptim.methods import DPSGD, DiceSGD, PrivateQuantile, ScaledClipNorm
from dpoptim.methods.private_quantile import QuantileSearch
from dpoptim.methods.scaled_clip_norm import PrivateScales
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.training.attach import attach

TRIALS = 8000
SEED = 8
# (n, batch size, passes), by what each shape shows: one pass, long memory, many passes, many
# passes of one batch.
DICE_RUNS = (
    (DiceSGD(1.0, 1.0, 2.0), (12, 4, 1)),
    (DiceSGD(1.0, 2.0, 2.0), (12, 4, 1)),
    (DiceSGD(1.0, 0.3, 3.0), (40, 1, 1)),
    (DiceSGD(1.0, 1.0, 2.0), (12, 4, 3)),
    (DiceSGD(1.0, 0.2, 3.0), (4, 4, 6)),
)
RECORDS, STEPS, RADIUS, COINS = 40, 12, 0.5, 1


def named_audits(*names: str) -> str:
    """The first finding of audits by name, each at most once in a million wrong."""
    for name in names:
        result = AUDITS[name](TRIALS, SEED)
        if result.verdict == "refuted":
            return (
                f"refuted: {name} claims epsilon {result.claimed:.3g}, audited "
                f"{result.lower_bound:.3g}"
            )
    return ""


def error_feedback() -> str:
    """Exact: how far one large gradient moves the true run, against the noise's S."""
    for method, (n, batch_size, passes) in DICE_RUNS:
        plan: Plan = method.plan(
            n=n, batch_size=batch_size, epochs=passes, noise_multiplier=1.0, delta=1e-5
        )
        quiet = replace(plan, noise_multiplier=0.0)
        allowed = plan.query.standard_deviation
        for record in range(0, n, max(1, n // 12)):
            x = torch.zeros(n, dtype=torch.float64)
            x[record] = 100.0
            moved = float(released_means(quiet, x, SEED).norm()) * batch_size
            if moved > allowed * (1 + 1e-6):
                return (
                    f"refuted: one record moves a run of {method} by {moved:.4g}, and the noise is "
                    f"for {allowed:.4g}"
                )
    return ""


def value_clipping() -> str:
    """Exact: records alone, in nets whose biases or later weights make most of the gradient."""
    for first, second, size in ((1.0, 1.0, 1e-3), (0.1, 30.0, 1.0)):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for p, scale in zip(model.parameters(), (first, first, second, second), strict=True):
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale)
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64) * size
        for i in range(6):
            moved = sum_norm(model, x[i : i + 1], torch.tensor([i % 3]))
            if moved > 0.1:
                return f"refuted: a record adds {moved:.4g} to a sum clipped to 0.1"
    return ""


def sum_norm(model: nn.Module, x: Tensor, y: Tensor) -> float:
    engine = ValueEngine(model, Clipping(0.1), capacity=1, paper=False)
    engine.attach()
    engine.begin_microbatch(1)
    engine.backward(F.cross_entropy(model(x), y, reduction="none"))
    engine.detach()
    return float(engine.take()[0].norm())


def clip_norm_search() -> str:
    """Exact: how far one record moves a search's queries, at most 1 for the noise."""
    for when in ("at the start", "all along"):
        queries = []
        for present in (False, True):
            settings = PrivateQuantile(0.5, 0.3, when, start=2.0)
            search = QuantileSearch(settings, Clipping, batch_size=10, steps=10, capacity=10)
            total = torch.zeros(2, dtype=torch.float64)
            if present:
                search.observe(torch.tensor([9.0], dtype=torch.float64))
                total[0] = 2.0
            queries.append(
                torch.cat([part.clone() for part in search.query(*search.scaled([[total]]))])
            )
        moved = float((queries[1] - queries[0]).norm())
        if moved > 1 + 1e-9 or math.isnan(moved):
            return (
                f"refuted: one record moves a query of the search {when} by {moved:.4g}, and the "
                "noise is for 1"
            )
    return ""


def scaled_gradients() -> str:
    """Exact: how far one record moves scaled sums and moments, at most 1 for the noise.

    Both worlds release the same, by which weights and biases have unequal scales. In float32,
    compiled functions measure and clip.
    """
    styles: tuple[Style, ...] = ("flat", "automatic", "per-layer")
    # all of a gradient is of biases, or nearly all of weights
    sizes, dtypes = (0.0, 1.0, 1e3), (torch.float64, torch.float32)
    for style, size, dtype in product(styles, sizes, dtypes):
        rule = Clipping(2.0, style)
        worlds = [scaled_sums(rule, size, present, dtype) for present in (False, True)]
        for step, (before, after) in enumerate(zip(*worlds, strict=True)):
            moved = float((after - before).norm())
            if not moved <= 1 + 1e-9:
                return (
                    f"refuted: one record moves the scaled query of step {step} by {moved:.4g} "
                    f"({style}), and the noise is for 1"
                )
    return ""


def scaled_sums(rule: Clipping, size: float, present: bool, dtype: torch.dtype) -> list[Tensor]:
    """Queries of some steps on one record; what is released does not depend on it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    engine = Engine(model, rule, capacity=1, reduction="sum")
    engine.attach()
    scales = PrivateScales(ScaledClipNorm(rule.norm, 1, 0.5, 0.3), rule, 1)
    entries = [p.numel() for p in engine.parameters]
    scales.see(entries, engine.totals.own_views, lambda step: 0.1)
    found = []
    for step in range(3):
        engine.clipping, engine.observer = scales.rule, scales.observe
        engine.begin_microbatch(1)
        losses = model(torch.full((1, 3), size, dtype=dtype)).sum(1) * 50 * present
        engine.backward(losses)
        asked = scales.query(*scales.scaled(engine.take_sums()))
        found.append(torch.cat([part.clone() for part in asked]))
        uneven = [(1.0, 900.0)[(place + step) % 2] for place in range(len(entries))]
        scales.answer([torch.ones_like(asked[0]), torch.tensor(uneven, dtype=torch.float64)])
    engine.detach()
    return found


def iterates() -> str:
    """Train by SGD, and find the last point and the one that was kept among those expected."""
    model = linear_of_zeros(3, 2, bias=True, dtype=torch.float64)
    x = torch.arange(3.0 * RECORDS, dtype=torch.float64).sin().view(RECORDS, 3)
    points = [parameters_of(model)]

    def step_again(*_: object) -> None:
        given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        points.append(nearest(points[-1] - torch.cat(given), points[0]))

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS // 4, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(x, (x[:, 0] > 0).long())
    with attach(
        plan, model, optimizer, data, noise_seed=COINS, projection=RADIUS, random_iterate=True
    ) as private:
        optimizer.register_step_pre_hook(step_again)  # after the gate's
        for inputs, labels in private.batches():
            private.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
    found = []
    if not torch.allclose(parameters_of(model), points[-1], rtol=0, atol=1e-9):
        found.append("the last point is not the projection of what released gradients lead to")
    private.swap_random_iterate()
    coins = KeyStream.from_seed(COINS, "random iterate")
    kept = [k for k in range(STEPS) if len(coins.coins(1, 1 / (k + 1)))][-1]
    if not torch.allclose(parameters_of(model), points[kept], rtol=0, atol=1e-9):
        found.append("the point that was kept is not the one that coins chose")
    return refuted_by(found)


def nearest(point: Tensor, start: Tensor) -> Tensor:
    """The nearest point of the ball around the start."""
    move = point - start
    return start + move * min(1.0, RADIUS / float(move.norm()))
