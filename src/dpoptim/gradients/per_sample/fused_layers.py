"""Which layers' gradients `fused_outer` takes together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample.fused_factors import FusedLayer
from dpoptim.gradients.per_sample.fused_outer import FusedOuter
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad

KEPT_AT_ONCE = 4 * MEMORY_CAP  # entries of all records' gradients: 1 GiB
ADDED_AT_ONCE = MEMORY_CAP  # entries of sums
FORMED_AT_ONCE = MEMORY_CAP  # numbers of factors that are only made for them


def fused_among(
    gradients: Mapping[int, PerSampleGrad], units: Sequence[str]
) -> Iterator[FusedOuter]:
    """Those of a pass's gradients that are chosen for it, by where they lie and how they are tiled.

    So many at a time that what they take beside the model stays small.
    """
    alike: dict[tuple[Any, ...], dict[int, FusedLayer]] = {}
    for place, each in gradients.items():
        if (layer := each.fused_layer()) is None:
            continue
        of, alone = layer.sizes, place if layer.looked_up else None
        key = layer.way, of.records, of.device, of.dtype, of.tile, of.divisor, alone
        alike.setdefault(key, {})[place] = layer
    for layers in alike.values():
        for some in in_parts(layers):
            yield FusedOuter(some, units)


def in_parts(layers: Mapping[int, FusedLayer]) -> Iterator[dict[int, FusedLayer]]:
    """Layers in their order, one at least in each part."""
    part: dict[int, FusedLayer] = {}
    entries = formed = 0
    for place, each in layers.items():
        of = each.sizes
        at_once = KEPT_AT_ONCE // max(1, of.records) if each.way == "kept" else ADDED_AT_ONCE
        full = entries + of.entries > at_once or formed + each.numbers > FORMED_AT_ONCE
        if part and full:
            yield part
            part, entries, formed = {}, 0, 0
        part[place] = each
        entries, formed = entries + of.entries, formed + each.numbers
    if part:
        yield part
