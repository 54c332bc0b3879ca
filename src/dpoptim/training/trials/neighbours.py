"""Comparison of a model's outputs for records beside others than before."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.hooks.seen_outputs import tensors_of
from dpoptim.training.trials.made_up_records import Sample

# Records that may change with the first one: layers between sorting and sorting back see another
# record there.
IN_OTHER_ORDERS = 2
TURNED = (
    ", which was built with batch_first=False, and so takes records on its second axis "
    "(batch_first=True: on the first)"
)
LARGE = 1e3  # within float16's range, and beyond what layers give of ordinary records


@torch.no_grad()
def neighbours_are_invisible(model: nn.Module, sample: Sample) -> bool:
    """Whether another record, also an enormous one, leaves all other records' outputs alone.

    Or one beside others within 0 and 1, as those of a data set may be, where it alone has others.
    """
    before = sample.outputs(model)
    for sizes in ((1.0,), (1e6, 1e3, 10.0)):
        after = with_another_record(model, sample, sizes)
        if after is not None and others_moved(before, after):
            return False
    try:
        found = [each.outputs(model) for each in sample.within_one()]
    except Exception:  # whatever the user's model raises on such numbers
        return True
    return not any(others_moved(found[0], other) for other in found[1:])


def others_moved(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether outputs of any record but the first one are others."""
    return any(moved(a[1:], b[1:]) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def mixed_beside_large(model: nn.Module, sample: Sample) -> str:
    """Say which layer computes otherwise for records beside one with large activations, or "".

    Quantised layers scale or choose by the largest number of a batch, or round all but columns with
    outliers: what a record is given outside, above all where it is made of tokens, shows it only
    where it happens to be the largest inside.
    """

    def mixed(*layers: nn.Module) -> bool | None:
        """None: they do not take such numbers."""
        with first_made(layers, sample.rows, large=False):  # a copy may be rounded otherwise
            before = sample.outputs(model)
        with first_made(layers, sample.rows, large=True):
            try:
                after = sample.outputs(model)
            except Exception:  # whatever the user's model raises on such numbers
                return None
        most = min(IN_OTHER_ORDERS, sample.rows - 2)
        return any(how_many_moved(a[1:], b[1:]) > most for a, b in zip(before, after, strict=True))

    layers = [*model.named_modules()][::-1]  # those inside of others first
    found = mixed(*model.modules())
    if found is None:
        layers = [(name, layer) for name, layer in layers if mixed(layer) is not None]
        found = mixed(*(layer for _, layer in layers))
    if not found:
        return ""
    while len(layers) > 1:
        half = layers[: len(layers) // 2]
        layers = half if mixed(*(layer for _, layer in half)) else layers[len(half) :]
    name, layer = layers[0]
    return (
        f"layer {name!r} ({type(layer).__name__}) computes otherwise for a record where another "
        "has large numbers, as quantised layers do with one scale for a batch. Fix, for a faster "
        "way: a scale for each row (PerRow, per token)"
    )


@torch.no_grad()
def first_mixing(model: nn.Module, sample: Sample) -> str:
    """Say where records meet first: in which layer, or before which, another one changes others.

    By what layers are given, and return, with records on the first axis; "" if that does not show.
    """
    changed = sample.with_another_first(1.0)
    before, after = (passed_on(model, each) for each in (sample, changed))
    for (where, a), (there, b) in zip(before, after, strict=False):
        if where != there or [x.shape for x in a] != [x.shape for x in b]:
            return ""
        if any(moved(x[1:], y[1:]) for x, y in zip(a, b, strict=True)):
            return where
    return ""


def passed_on(model: nn.Module, sample: Sample) -> list[tuple[str, list[Tensor]]]:
    """Tensors with records first that layers are given and return, in turn; where, in words."""
    found = list[tuple[str, list[Tensor]]]()

    def note(where: str, values: Any) -> None:
        tensors = [x for x in tensors_of(values) if x.shape[:1] == (sample.rows,)]
        found.append((where, [x for x in tensors if x.is_floating_point()]))

    hooks = []
    for name, layer in model.named_modules():
        words = f"layer {name!r} ({type(layer).__name__})"
        turned = any(getattr(each, "batch_first", True) is False for each in layer.modules())
        inside = f"in {words}{turned * TURNED}" if name else ""
        hooks += [
            layer.register_forward_pre_hook(
                lambda _, args, given, words=words: note(f"before {words}", (args, given)),
                with_kwargs=True,
            ),
            layer.register_forward_hook(lambda _, given, output, at=inside: note(at, output)),
        ]
    try:
        sample.call(model)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def first_made(layers: Iterable[nn.Module], rows: int, *, large: bool) -> Iterator[None]:
    """Give layers copies, with the first record scaled where it is to be made ``large``.

    `LARGE` is then the largest number. Copies lie in memory otherwise than what was given, where
    this was transposed, say; kernels for few digits may round them otherwise.
    """

    def scale(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:1] != (rows,):
            return None
        factor = LARGE / x[:1].abs().max().clamp(min=1 / LARGE) if large else torch.ones(())
        return torch.cat([x[:1] * factor.to(x), x[1:]]), *args[1:]

    hooks = [layer.register_forward_pre_hook(scale) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def moved(a: Tensor, b: Tensor) -> bool:
    """Whether outputs are others, beyond rounding."""
    return how_many_moved(a[None], b[None]) > 0


def how_many_moved(a: Tensor, b: Tensor) -> int:
    """How many records' outputs, on the first axis, are others, beyond rounding."""
    if not a.numel():
        return 0
    distance = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    rounding = 1e-5 * a.nan_to_num(0, 0, 0).abs().max()
    return int((~(distance.reshape(len(a), -1).amax(1) <= rounding)).sum())


def with_another_record(
    model: nn.Module, sample: Sample, sizes: tuple[float, ...]
) -> list[Tensor] | None:
    """The outputs with another first record, of the first size that the model takes; or None."""
    for size in sizes:
        try:
            return sample.with_another_first(size).outputs(model)
        except Exception:  # whatever the user's model raises on numbers of this size
            if len(sizes) == 1:
                raise
    return None
