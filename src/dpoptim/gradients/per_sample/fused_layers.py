"""Which layers' gradients `fused_outer` takes together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample.fused_factors import Factors, Way
from dpoptim.gradients.per_sample.fused_outer import FusedOuter
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter

KEPT_AT_ONCE = 4 * MEMORY_CAP  # entries of all records' gradients: 1 GiB
ADDED_AT_ONCE = MEMORY_CAP  # entries of sums


def fused_among(
    gradients: Mapping[int, PerSampleGrad], units: Sequence[str]
) -> Iterator[FusedOuter]:
    """Those of a pass's gradients that are chosen for it, by where they lie and how they are tiled.

    So many at a time that what they take beside the model stays small.
    """
    alike: dict[tuple[Any, ...], dict[int, Factors]] = {}
    for place, each in gradients.items():
        if not isinstance(each, SequenceOuter) or each.fused is None:
            continue
        of = each.factors()
        alone = place if of.lookups is not None else None
        key = each.fused, of.g.device, of.g.dtype, of.tile, of.divisor, alone
        alike.setdefault(key, {})[place] = of
    for (way, *_), layers in alike.items():
        for some in in_parts(layers, way):
            yield FusedOuter(some, way, units)


def in_parts(layers: Mapping[int, Factors], way: Way) -> Iterator[dict[int, Factors]]:
    """Layers in their order, one at least in each part."""
    part: dict[int, Factors] = {}
    entries = 0
    for place, each in layers.items():
        at_once = KEPT_AT_ONCE // max(1, len(each.g)) if way == "kept" else ADDED_AT_ONCE
        if part and entries + each.entries > at_once:
            yield part
            part, entries = {}, 0
        part[place] = each
        entries += each.entries
    if part:
        yield part
