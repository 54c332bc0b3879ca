"""Choosing a way for an architecture as `attach` does, and holding what it gives against records
taken one at a time.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import clipped_sums, gradients_alone, squared_norms
from dpoptim.training.trials.deterministic_runs import quiet
from dpoptim.training.trials.isolation import Chosen, choose_isolation
from dpoptim.training.trials.made_up_records import Sample
from dpoptim.training.trials.probe import show_the_batch_axis

TOLERANCE = 2e-5  # of the norm of the sums: some layers compute in float32 whatever they are given


class Records(Dataset[Any]):
    def __init__(self, record: Callable[[], Any]) -> None:
        self.record = record

    def __getitem__(self, index: int) -> Any:
        return self.record()

    def __len__(self) -> int:
        return 8


class ByName(nn.Module):
    """Takes what another model takes, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self.model(x) if other is None else self.model(x, other)


class InOrder(nn.Module):
    """Takes what another model takes by name, in order."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def double(record: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(wide, record)


def freeze_batch_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval().requires_grad_(False)
    return model


def of_records(sample: Sample, rows: int, record: Callable[[], Any]) -> Sample:
    """The sample's call on so many records of the data set."""
    leaves, structure = pytree.tree_flatten((sample.args, sample.kwargs))
    batch = [
        torch.randint(0, 2, (rows, *leaf.shape[1:])).to(leaf.dtype)
        if sample.whole or not leaf.is_floating_point()
        else torch.randn(rows, *leaf.shape[1:], dtype=leaf.dtype)
        for leaf in (
            leaf.movedim(sample.axis, 0) if leaf.dim() > sample.axis else leaf for leaf in leaves
        )
    ]
    # Masks stay as they are, of ones: a record without any token has no gradient.
    ones = [bool((leaf == 1).all()) for leaf in leaves]
    batch = [torch.ones_like(t) if one else t for t, one in zip(batch, ones, strict=True)]
    turned = [t.movedim(0, sample.axis) if t.dim() > sample.axis else t for t in batch]
    args, kwargs = pytree.tree_unflatten(turned, structure)
    return replace(sample, args=args, kwargs=kwargs, rows=rows)


def axes_in_sight(sample: Sample) -> list[int]:
    """The sizes of a record's axes."""
    leaves = pytree.tree_leaves((sample.args, sample.kwargs))
    return sorted({size for leaf in leaves for size in leaf.shape if 1 < size <= 8} - {sample.rows})


def deviation(model: nn.Module, sample: Sample, chosen: Chosen) -> float:
    """How far the engine's clipped sums are from those of records taken one at a time, over their
    norm.
    """
    weights = [torch.randn_like(out) for out in sample.outputs(model)]

    def loss(model: nn.Module, batch: tuple[Sample, list[Tensor]]) -> Tensor:
        terms = [(out * w).sum() for out, w in zip(batch[0].outputs(model), batch[1], strict=True)]
        return sum(term.double() for term in terms)  # type: ignore[return-value]

    singles = [(sample.records([i]), [w[i : i + 1] for w in weights]) for i in range(sample.rows)]
    gradients = gradients_alone(model, loss, singles)
    clipping = Clipping(float(squared_norms(gradients).sqrt().median()) / 2)
    expected = clipped_sums(gradients, clipping, sample.rows, "sum")
    engine = Engine(
        model, clipping, capacity=sample.rows, reduction="sum", isolation=chosen.isolation
    )
    engine.attach()
    show_the_batch_axis(model, chosen.sample)  # as `attach` does
    try:
        for part in singles if chosen.isolation.alone else [(sample, weights)]:
            engine.begin_microbatch(part[0].rows)
            loss(model, part).backward()
        sums = engine.split(engine.take())
    finally:
        engine.detach()
    error = torch.stack([(a - b).norm() for a, b in zip(sums, expected, strict=True)]).norm()
    return float(error / torch.stack([b.norm() for b in expected]).norm())


def way_and_deviation(
    build: Callable[[], nn.Module],
    record: Callable[[], Any],
    *,
    wide: bool = True,
    like_axes: bool = True,
) -> tuple[Isolation, float]:
    """The way that is chosen for an architecture, and the worst deviation for batches unlike every
    axis, and (``like_axes``) like each.
    """
    torch.manual_seed(0)
    model = freeze_batch_statistics(build())
    model = model.double() if wide else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = choose_isolation(model, Records(lambda: double(record()) if wide else record()))
    assert chosen.sample is not None, chosen.basis[-1].text
    sample, worst = chosen.sample, 0.0
    for rows in (*(axes_in_sight(sample) if like_axes else ()), sample.rows):
        other = of_records(sample, rows, record)
        with warnings.catch_warnings(), quiet(model, lambda other=other: other.outputs(model)):  # type: ignore[misc]
            warnings.simplefilter("ignore")
            worst = max(worst, deviation(model, other, chosen))
    return chosen.isolation, worst
