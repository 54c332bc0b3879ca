"""Named audits at fixed, small settings: tried against mutants, and quick checks of an install.

Each detector is a function without arguments that returns its first finding (no text: none).
Statistical ones are set so that each of them raises a false alarm with probability at most
``FAILURE``; coins and noise are seeded all the same, so that a result repeats. The others are
exact.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from dpoptim.audit.charging import audit_charging, calibrations
from dpoptim.audit.isolation import isolation
from dpoptim.audit.later_batches import later_batches
from dpoptim.audit.method_detectors import (
    clip_norm_search,
    error_feedback,
    iterates,
    named_audits,
    scaled_gradients,
    value_clipping,
)
from dpoptim.audit.min_separation import prices
from dpoptim.audit.noise import audit_noise, audit_redrawn_noise
from dpoptim.audit.orders_of_persons import orders_of_persons
from dpoptim.audit.participation import audit_participation
from dpoptim.audit.raw_data import columns, encoding, image_features, owners
from dpoptim.audit.refunds import refunds
from dpoptim.audit.refused_loops import refused
from dpoptim.audit.replay import audit_replay
from dpoptim.audit.resumed_runs import checkpoint_parts, places, resumed_noise
from dpoptim.audit.searches import searches
from dpoptim.audit.selected_rows import row_selection
from dpoptim.audit.sensitivity import Batch, SensitivityResult, audit_sensitivity
from dpoptim.audit.shares import shares
from dpoptim.audit.statistics import attributes, statistics
from dpoptim.audit.two_worlds import Canaries, audit_two_worlds
from dpoptim.audit.units import persons, repeated_records
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach

FAILURE = 1e-6
SEED = 8
PARTICIPATION: dict[str, dict[str, Any]] = {
    "hundreds": {"records": 400, "batch_size": 100, "steps": 200},
    "one or none": {"records": 4, "batch_size": 1, "steps": 500},  # a third of the batches empty
    "no more than expected": {
        "records": 40,
        "batch_size": 20,
        "steps": 150,
        "largest_batch": 1.0,
    },
}
Detector = Callable[[], str]


def finding(result: Any) -> str:
    return str(result) if result.verdict == "refuted" else ""


def first_finding(results: Iterable[Any]) -> str:
    return next(filter(None, map(finding, results)), "")


def two_worlds(
    *, canaries: int, sample_rate: float, steps: int, neighboring: str = "add-or-remove-one"
) -> str:
    """Two worlds; the plan is made here, to attack planning too, with C unlike 1."""
    plan = DPSGD(clip_norm=2.0).plan(
        n=canaries,
        batch_size=round(sample_rate * canaries),
        steps=steps,
        noise_multiplier=2.0 if neighboring == "replace-one" else 1.0,
        delta=1e-5,
        neighboring=neighboring,
    )
    return finding(audit_two_worlds(plan, confidence=1 - FAILURE, seed=SEED, noise_seed=SEED))


def sensitivity() -> str:
    return first_finding(audit() for audit in sensitivities().values())


def sensitivities() -> dict[str, Callable[[], SensitivityResult]]:
    """Audits of models whose norms are easily got wrong, each with the records that show it."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    torch_state = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    try:
        deep = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        usual = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
        twice = Twice(nn.Linear(6, 4)).double()
        images = nn.Conv1d(3, 16, 1, bias=False)
        thin, thinner = nn.Linear(4, 1, bias=False), nn.Linear(3, 1, bias=False)
        states = nn.GRU(4, 3, bias=False, batch_first=True)
        groups, made = nn.GroupNorm(2, 4), parametrizations.weight_norm(nn.Linear(4, 1))
        strided = nn.Sequential(nn.Conv1d(1, 16, 2, 2), nn.Tanh(), nn.Conv1d(16, 8, 2, 2))
    finally:
        torch.random.set_rng_state(torch_state)
    half = 1e4 * normal(6, 1, 4)
    # two positions whose gradients almost cancel
    cancelling = torch.cat([half, 2 * normal(6, 1, 4) - half], 1)
    # records that pull with their own states, and against those of the one before
    of_inputs, of_states = states.parameters()
    nn.init.constant_(of_inputs.requires_grad_(False), 0.5)
    nn.init.constant_(of_states, 0.1)
    signs = torch.tensor([1.0, -1] * 3).view(-1, 1, 1).expand(-1, 4, 4)
    # one record that pulls, beside others that do not
    alone = torch.zeros(6, 4, 4)
    alone[0] = 1.0
    # Just below C, so that 1/4007 and 1/4006 round all of them apart together; the record itself
    # is clipped to C.
    aligned = (torch.tensor([0.6, -0.64, 0.48]) * 0.9999 / 3).repeat(4007, 1)
    of = partial(partial, audit_sensitivity)
    huge = ("plain", "huge")
    numbers = ("plain", "huge", "nan")
    return {
        "deep": of(deep, (normal(6, 6).double(),), steep_loss, 0.5),
        "in microbatches": of(
            deep, (normal(6, 6).double(),), steep_loss, 0.5, microbatches=2, kinds=huge
        ),
        "usual": of(usual, (normal(6, 6),), steep_loss, 0.5, kinds=numbers),
        "tied": of(twice, (normal(6, 6).double(),), steep_loss, 0.5, kinds=huge),
        "images": of(images, (normal(6, 3, 5),), steep_loss, 0.5, kinds=numbers),
        "cancelling": of(thin, (cancelling,), steep_loss, 1.0, kinds=("plain",)),
        "states": of(states, (signs,), state_loss, 0.5, kinds=("plain",), tolerance=1e-6),
        "groups": of(groups, (alone,), own_loss, 0.5, kinds=("plain",), tolerance=1e-6),
        "made weights": of(made, (alone,), own_loss, 0.5, kinds=("plain",), tolerance=1e-6),
        "roundings": of(
            thinner, (aligned,), mean_loss, 1.0, reduction="mean", kinds=("huge",), records=1
        ),
        "strided": of(
            strided, (normal(6, 1, 8),), steep_loss, 0.5, kinds=("plain", "nan"), tolerance=1e-6
        ),
    }


class Twice(nn.Module):
    """A layer used twice, with gradients that add up."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x)


def steep_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 3 * model(batch[0]).flatten(1).sum()


def state_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 3e3 * (model(batch[0])[0] * batch[0][..., :1]).sum()


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 3 * (model(batch[0]) * batch[0]).sum()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 3 * model(batch[0]).mean()


def replay() -> str:
    """One record made extreme or left out, and a record without gradient left out."""
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(40, 3, generator=generator), torch.arange(40) % 2
    pairs: list[tuple[Callable[[Any], Any], Any, Any]] = []
    for value in (1.0, 1e30, float("nan")):
        other = x.clone()
        other[5] = value
        pairs.append((partial(seen_of_training, sample_rate=0.3), (x, y), (other, y)))
    pairs.append((partial(seen_of_training, sample_rate=1.0), (x, y), (x[:-1], y[:-1])))
    sign = torch.ones(40)
    sign[-1] = 0
    pairs.append((model_of_canaries, sign, sign[:-1]))
    return first_finding(
        audit_replay(run, a, b, charged=("released",), seed=SEED) for run, a, b in pairs
    )


def seen_of_training(data: tuple[Tensor, Tensor], *, sample_rate: float) -> dict[str, Any]:
    """A seeded training run, and what its caller can see of it apart from the model."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=round(40 * sample_rate), steps=6, noise_multiplier=1.0, delta=1e-5
    )
    finished = []
    with attach(plan, model, optimizer, TensorDataset(*data), noise_seed=SEED) as private:
        for bx, by in private.batches():
            private.backward(F.cross_entropy(model(bx), by, reduction="none"))
            optimizer.step()
            finished.append(private.finished_step)
        return {
            "released": model.state_dict(),
            "spent": str(private.spent()),
            "remaining": private.remaining(),
            "steps": private.steps_done,
            "finished": finished,
            "basis": private.basis,
        }


def model_of_canaries(sign: Tensor) -> Tensor:
    """Full batches of canaries, the last without gradient: the model must not tell of it."""
    model = Canaries(40, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(n=40, batch_size=40, steps=2, noise_multiplier=1.0, delta=1e-5)
    data = TensorDataset(torch.arange(len(sign)), sign)
    with attach(plan, model, optimizer, data, noise_seed=SEED) as private:
        for index, factor in private.batches():
            private.backward(3 * factor * model(index))
            optimizer.step()
    return model.table.weight.detach()


def noise() -> str:
    return finding(audit_noise(failure=FAILURE, noise_seed=SEED))


def redrawn_noise() -> str:
    return finding(audit_redrawn_noise(failure=FAILURE, noise_seed=SEED))


def participation() -> str:
    failure = FAILURE / 3
    return first_finding(
        audit_participation(**each, failure=failure, noise_seed=SEED)
        for each in PARTICIPATION.values()
    )


def refusals() -> str:
    """Loops whose gradients would escape clipping or count twice must be refused by name."""

    def functional(model: nn.Linear, x: Tensor) -> None:
        (model(x) + F.linear(100 * x, model.weight)).mean().backward()

    def penalty(model: nn.Linear, x: Tensor) -> None:
        (model(x).mean() + model.weight.square().sum()).backward()

    def two_passes(model: nn.Linear, x: Tensor) -> None:
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def rounded_mean(model: nn.Linear, x: Tensor) -> None:
        model(x).mean().backward()

    steps = [partial(one_step, loop) for loop in (functional, penalty, two_passes)]
    steps.append(partial(one_step, rounded_mean, Rounds()))
    accepted = [step.args[0].__name__ for step in steps if not refused(step)]
    return f"refuted: accepted {', '.join(accepted)}" if accepted else ""


class Rounds(nn.Linear):
    """A layer whose gradients are rounded to bfloat16 before they come to it."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16().float()


def one_step(backward: Callable[[nn.Linear, Tensor], None], model: nn.Linear | None = None) -> None:
    model, data = model or nn.Linear(3, 1), TensorDataset(torch.ones(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(n=8, batch_size=8, steps=1, noise_multiplier=1.0, delta=1e-5)
    with attach(plan, model, optimizer, data, noise_seed=SEED) as private:
        for (x,) in private.batches():
            backward(model, x)
            optimizer.step()


DETECTORS: dict[str, Detector] = {
    "two worlds, full batch": partial(two_worlds, canaries=100_000, sample_rate=1.0, steps=4),
    "two worlds, sampled": partial(two_worlds, canaries=40_000, sample_rate=0.1, steps=60),
    "two worlds, replace-one": partial(
        two_worlds, canaries=20_000, sample_rate=1.0, steps=4, neighboring="replace-one"
    ),
    "sensitivity": sensitivity,
    "replay": replay,
    "noise": noise,
    "redrawn noise": redrawn_noise,
    "participation": participation,
    "charging": lambda: finding(audit_charging()),
    "refunds": refunds,
    "refunds, adaptive": partial(refunds, adaptive=True),
    "checkpoint parts": checkpoint_parts,
    "resumed noise": resumed_noise,
    "places": places,
    "repeated records": repeated_records,
    "refusals": refusals,
    "isolation": isolation,
    "later batches": later_batches,
    "persons": persons,
    "orders of persons": orders_of_persons,
    "shares": shares,
    "error feedback": error_feedback,
    "correlated noise": partial(
        named_audits,
        "dp-ftrl, tree",
        "dp-ftrl, Toeplitz",
        "dp-ftrl, two passes",
        "dp-ftrl, Honaker, two passes",
    ),
    "banded noise": partial(
        named_audits,
        "dp-ftrl, best, two passes",
        "dp-ftrl, two vectors, two passes",
        "dp-ftrl, no vectors, two passes",
        "dp-ftrl, cosine decay, two passes",
        "dp-ftrl, planned rates, two passes",
        "dp-ftrl, every turn",
    ),
    "balls in bins": partial(named_audits, "dp-ftrl, balls in bins"),
    "b-min-sep": partial(named_audits, "dp-ftrl, b-min-sep"),
    "b-min-sep accounting": prices,
    "calibration": calibrations,
    "solvers": partial(named_audits, "noisy-gd", "kl-spider", "adaptive-gd", "accelerated-srgd"),
    "norms": partial(named_audits, "adaptive-gd, norms"),
    "selection": partial(named_audits, "quantile"),
    "searches": searches,
    "best of trials": partial(named_audits, "search, order statistics"),
    "statistics": statistics,
    "encoding": encoding,
    "columns": columns,
    "owners": owners,
    "attributes": attributes,
    "image features": image_features,
    "value clipping": value_clipping,
    "clip norm search": clip_norm_search,
    "selected rows": partial(row_selection, FAILURE, SEED),
    "scaled gradients": scaled_gradients,
    "iterates": iterates,
}
