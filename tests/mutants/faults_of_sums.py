"""Privacy bugs that have happened, put into this library for as long as a ``with`` lasts:
clipping, sampling, leaks.

For testing the detectors only. A run under a fault promises nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.clipping import Clipping, Units
from dpoptim.gradients import backward_pass, record_by_record
from dpoptim.gradients import engine as engine_module
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.arithmetic.products import Groups
from dpoptim.gradients.backward_pass import BackwardPass
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.layers import convolution, linear, normalisation
from dpoptim.gradients.per_sample import claimed_layers, ghost_norms, native, sequence_outer
from dpoptim.gradients.per_sample import per_sample_grads as per_sample_grads_module
from dpoptim.gradients.per_sample.joined import Joined
from dpoptim.gradients.per_sample.per_sample_grads import Bias, Dense, Outer, PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter, one_axis, positions
from dpoptim.gradients.per_sample.single_rows import SingleRows
from dpoptim.gradients.per_sample.tied import merge
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.noise.few_rows import write_out
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling, TruncatedPoissonSampling
from dpoptim.training.batches.microbatches import MicrobatchSampler
from dpoptim.training.optimizer_hooks import OptimizerHooks

Indices = NDArray[np.int64]

# ---- clipping -----------------------------------------------------------------------------------


@dataclass
class _Renormed(PerSampleGrad):
    """A per-sample gradient whose norm is measured by somebody else."""

    honest: PerSampleGrad
    measure: Callable[[Groups], Tensor]

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return self.measure(groups)

    def materialise(self, records: slice) -> Tensor:
        return self.honest.materialise(records)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        self.honest.add_weighted_sums(sums, weights, groups)

    def without(self, keep: Tensor) -> PerSampleGrad:
        return self.honest.without(keep)

    def bias(self) -> PerSampleGrad:
        """Of a weight's."""
        assert isinstance(self.honest, Outer | SequenceOuter)
        return self.honest.bias()


@contextmanager
def bias_left_out() -> Iterator[None]:
    unmeasured = patch.object(
        Bias, "squared_norms", lambda self, *how: self.outer.g.new_zeros(len(self.outer.g)).double()
    )
    formed = patch.object(
        Dense,
        "squared_norms",
        lambda self, *how: torch.zeros(len(self.values), dtype=torch.float64),
    )

    def nothing(self: Joined, block: int) -> dict[str, Tensor]:
        return {unit: 0 * squared for unit, squared in measure(self, block).items()}

    measure, joined = Joined.measure, patch.object(Joined, "measure", nothing)
    with unmeasured, formed, joined:
        yield


def inputs_left_out() -> AbstractContextManager[Any]:
    honest = per_sample_grads_module.squared_norms_together

    def together(several: Sequence[Tensor], *, block: int) -> tuple[list[Tensor], bool]:
        squared, tame = honest(several, block=block)
        left = squared[: len(several) // 2]
        return [*left, *map(torch.ones_like, squared[len(left) :])], tame

    return patch.object(per_sample_grads_module, "squared_norms_together", together)


def inputs_of_rows_left_out() -> AbstractContextManager[Any]:
    """Compiled functions measure output gradients alone."""
    return rows_measured_by(
        lambda each, block: (each.outer if isinstance(each, Bias) else each).left_squared_norms(
            block
        )
    )


def last_part_unmeasured() -> AbstractContextManager[Any]:
    """The last of the parts that work is cut into is done by no thread."""

    def all_but_half(each: PerSampleGrad, block: int) -> Tensor:
        squared = each.squared_norms([[1]], block).clone()
        squared[len(squared) // 2 :] = 0
        return squared

    return rows_measured_by(all_but_half)


@contextmanager
def rows_measured_by(measure: Callable[[Any, int], Tensor]) -> Iterator[None]:
    """What compiled functions measure of single rows: made up, so that none need be built."""

    class Blind:
        def __init__(self, gradients: Mapping[int, PerSampleGrad], unit: str) -> None:
            self.places = [*gradients]
            self._gradients, self._unit = gradients, unit

        def measure(self, block: int) -> dict[str, Tensor]:
            self._squares = [measure(each, block) for each in self._gradients.values()]
            return {self._unit: sum(self._squares)}

        def longest(self) -> Tensor:
            return self._squares[0]

        def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
            for place, each in self._gradients.items():
                counted = each.without(weights[self._unit][0] > 0)
                counted.add_weighted_sums(sums[place], weights[self._unit], groups)

    def among(gradients: Mapping[int, PerSampleGrad], units: Sequence[str]) -> Blind | None:
        rows = {
            place: each
            for place, each in gradients.items()
            if isinstance(each, Outer | Bias) and each.materialise(slice(1)).dtype == torch.float32
        }
        return Blind(rows, units[0]) if rows else None

    with patch.object(SingleRows, "among", among), apart():
        yield


def apart() -> AbstractContextManager[Any]:
    """Records are measured, clipped and added up by a call each."""
    return patch.object(Units, "in_c", lambda self, margin: None)


def rows_in_the_next_place() -> AbstractContextManager[Any]:
    """Compiled products write a row's result where the next row's belongs.

    Made up, so that none need be built.
    """
    honest = linear.linear

    def product(x: Tensor, w: Tensor, bias: Tensor | None = None, spare: int = 0) -> Tensor:
        return honest(x, w, bias, spare).roll(1, 0)

    return patch.object(linear, "linear", product)


def positions_of_the_record_before() -> AbstractContextManager[Any]:
    """Compiled sums of normalised positions take in those of the record before.

    Made up, so that none need be built.
    """
    honest = normalisation.sum_normalised

    def sums(*given: Any) -> tuple[Tensor, Tensor]:
        scaled, whole = honest(*given)
        return scaled + scaled.roll(1, 0), whole + whole.roll(1, 0)

    return patch.object(normalisation, "sum_normalised", sums)


def images_in_the_next_place() -> AbstractContextManager[Any]:
    """Compiled convolutions write a record's output where the next one's belongs.

    Made up, so that none need be built; for those without padding.
    """

    def output(module: nn.Module, x: Tensor) -> Tensor:
        convolve = convolution.CONVOLVE[x.dim() - 2]
        return convolve(x, module.weight, module.bias, module.stride).roll(1, 0)

    return patch.object(convolution.small_convolutions, "output", output)


def bound_in_c_too_large() -> AbstractContextManager[Any]:
    """Compiled functions are told another bound than the noise is made for."""
    honest = Clipping.in_c

    def in_c(self: Clipping, margin: float) -> tuple[float, ...]:
        raised, bound, *rest = honest(self, margin)
        return raised, 2 * bound, *rest

    return patch.object(Clipping, "in_c", in_c)


def one_layer_not_clipped() -> AbstractContextManager[Any]:
    honest = Engine._add_clipped

    def add_clipped(self: Engine, merged: dict[int, PerSampleGrad], rows: int) -> None:
        last = max(merged)
        unseen = _Renormed(merged[last], lambda groups: torch.zeros(rows, dtype=torch.float64))
        honest(self, {**merged, last: unseen}, rows)

    return patch.object(Engine, "_add_clipped", add_clipped)


def factors_of_neighbours() -> AbstractContextManager[Any]:
    """Of records formed a few at once, each has the clip factor of the one before."""
    honest = record_by_record.add_few

    def add_few(totals: Sequence[Tensor], gradients: Tensor, weights: list[list[float]]) -> None:
        honest(totals, gradients, [*weights[-1:], *weights[:-1]])

    return patch.object(record_by_record, "add_few", add_few)


def last_of_a_few_unmeasured() -> AbstractContextManager[Any]:
    """The last record of a part that is formed at once is nothing to its norm."""
    honest = record_by_record.norms_by_unit

    def measured(shares: Sequence[record_by_record.Share], block: int) -> dict[str, Tensor]:
        squared = honest(shares, block)
        if any(isinstance(formed, Tensor) for share in shares for formed in share.formed):
            for each in squared.values():
                each[-1] = 0
        return squared

    return patch.object(record_by_record, "norms_by_unit", measured)


@contextmanager
def compiled_norms_of_the_first_outputs() -> Iterator[None]:
    """Compiled functions measure less than they form: made up, so that none need be built.

    For convolutions of one axis, without padding.
    """

    def form(
        geometry: native.Geometry,
        x: Tensor,
        g: Tensor,
        out: Tensor,
        norms: Tensor,
        there: Tensor | None,
    ) -> None:
        places = x.unfold(2, geometry.kernel[2], geometry.stride[2]).transpose(2, 3).flatten(1, 2)
        formed = torch.bmm(places, g.transpose(1, 2))
        out.copy_(formed.flatten(1))
        norms.zero_()[:, 0] = formed[:, :, :2].flatten(1).norm(dim=1)

    fakes = {"serves": lambda like: like.dtype == torch.float32, "adds": lambda *given: False}
    with patch.multiple(native, form=form, **fakes):
        yield


@contextmanager
def longer_than_claimed() -> Iterator[None]:
    """Ghost norms read low, and what is longer is added as it is."""
    honest = sequence_outer.ghost_squared_norms

    def low(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ghost, longest = honest(g, a)
        return ghost / 16, longest

    claimed = patch.object(
        SequenceOuter,
        "chosen",
        lambda self, public: replace(self, most=public.most, ghost_norms=True, alone=True),
    )
    as_it_is = patch.object(ghost_norms, "shortening", lambda ghost, squared: squared * 0 + 1)
    low_together = patch.object(
        claimed_layers, "with_rounding", lambda squared, lengths, dtype: squared / 16
    )
    low_alone = patch.object(sequence_outer, "ghost_squared_norms", low)
    with claimed, as_it_is, low_alone, low_together:
        yield


def cross_terms_left_out() -> AbstractContextManager[Any]:
    def merged(
        uses: Sequence[PerSampleGrad], records: int, entries: int, most: int
    ) -> PerSampleGrad:
        if len(uses) == 1:
            return uses[0]
        apart = partial(lambda uses, groups: sum(use.squared_norms(groups) for use in uses), uses)
        return _Renormed(merge(uses, records, entries, most), apart)

    return patch.object(engine_module, "merge", merged)


def gram_norms_in_large_batches() -> AbstractContextManager[Any]:
    def by_size(g: Tensor, a: Tensor) -> Outer | SequenceOuter | _Renormed:
        honest = positions(g, a)
        if g.shape[0] < 4:
            return honest
        g, a = one_axis(g), one_axis(a)
        gram = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
        return _Renormed(honest, lambda groups: gram.sum((1, 2)).clamp(min=0).double())

    return patch.object(linear, "positions", by_size)


def no_rounding_margin() -> AbstractContextManager[Any]:
    return patch.object(engine_module, "margin", lambda dtype, capacity, *, common_factor: 0.0)


@contextmanager
def factors_by(change: Callable[[Clipping, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Clip factors are ``change(rule, honest factors, squared norms)``."""
    honest = Clipping.factors
    changed = patch.object(
        Clipping,
        "factors",
        lambda self, squared, margin: change(self, honest(self, squared, margin), squared),
    )
    with changed, apart():
        yield


def nan_factors(rule: Clipping, factors: Tensor, squared: Tensor) -> Tensor:
    return rule.norm / squared.sqrt().clamp(min=rule.norm)


def batch_clipped_as_a_whole(rule: Clipping, factors: Tensor, squared: Tensor) -> Tensor:
    largest = torch.where(torch.isfinite(squared), squared, 0.0).max().sqrt()
    return torch.where(factors > 0, rule.norm / largest.clamp(min=rule.norm), 0.0) * 0.999


def norm_in_message(rule: Clipping, factors: Tensor, squared: Tensor) -> Tensor:
    if float(squared.max()) > 1e6 * rule.norm**2:
        raise ValueError(
            f"a record's gradient has norm {float(squared.max()) ** 0.5:g}; lower the learning rate"
        )
    return factors


def clipped_share_logged(rule: Clipping, factors: Tensor, squared: Tensor) -> Tensor:
    logging.getLogger("dpoptim").info("%d gradients clipped", int((factors < 0.99).sum()))
    return factors


@contextmanager
def realised_denominator() -> Iterator[None]:
    begin_microbatch = Engine.begin_microbatch
    take, take_by_parameter = Engine.take_sums, Engine.take_by_parameter
    delivered = {"rows": 0}

    def counted(self: Engine, records: int, **announced: Any) -> None:
        delivered["rows"] += records
        begin_microbatch(self, records, **announced)

    def divided(self: Engine, sums: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        share = self.capacity / max(delivered["rows"], 1)
        delivered["rows"] = 0
        return [[buffer * share for buffer in each] for each in sums]

    def by_parameter(self: Engine) -> list[Tensor]:
        return divided(self, [write_out(take_by_parameter(self))])[0]

    with (
        patch.object(Engine, "begin_microbatch", counted),
        patch.object(Engine, "take_sums", lambda self: divided(self, take(self))),
        patch.object(Engine, "take_by_parameter", by_parameter),
    ):
        yield


def rows_printed() -> AbstractContextManager[Any]:
    honest = Engine.begin_microbatch

    def begin_microbatch(self: Engine, records: int, **announced: Any) -> None:
        print(f"batch of {records}")
        honest(self, records, **announced)

    return patch.object(Engine, "begin_microbatch", begin_microbatch)


def rows_clipped_apart() -> AbstractContextManager[Any]:
    honest = Engine.begin_microbatch

    def begin_microbatch(
        self: Engine, records: int, *, present: Tensor | None = None, **announced: Any
    ) -> None:
        if present is None:
            return honest(self, records, **announced)
        self.rows = ONE_ROW
        return honest(
            self, present.numel(), **{**announced, "groups": None}, present=present.reshape(-1, 1)
        )

    return patch.object(Engine, "begin_microbatch", begin_microbatch)


def person_in_two_microbatches() -> AbstractContextManager[Any]:
    honest = MicrobatchSampler.microbatches

    def microbatches(self: MicrobatchSampler) -> Iterator[Indices]:
        for items in honest(self):
            note = self.drawn.pop()
            if note.present is None:
                self.drawn.append(note)
                yield items
                continue
            first = note.present.clone()
            first[:, 1:] = False
            for present, last in ((first, False), (note.present & ~first, note.last)):
                self.drawn.append(replace(note, present=present, last=last))
                yield items

    return patch.object(MicrobatchSampler, "microbatches", microbatches)


def absent_rows_counted() -> AbstractContextManager[Any]:
    honest = RowsOfRecords.of_records
    return patch.object(
        RowsOfRecords,
        "of_records",
        lambda self, rows, count, present: honest(self, rows, count, None),
    )


def roundings_unseen() -> AbstractContextManager[Any]:
    return patch.object(backward_pass, "narrow_operation", lambda results: None)


@contextmanager
def functional_use_unseen() -> Iterator[None]:
    """Neither the hook on the parameter nor the look at .grad before the step."""
    honest, turn, escaped = OptimizerHooks._before_step, OptimizerHooks._turn, list[Any]()

    def looked_away(self: OptimizerHooks, *step: Any) -> Any:
        escaped[:] = [p.grad for p in self._engine.parameters]
        for p in self._engine.parameters:
            p.grad = None
        return turn(self, *step)

    def before_step(self: OptimizerHooks, *step: Any) -> Any:
        changed = honest(self, *step)
        for p, g in zip(self._engine.parameters, escaped, strict=True):
            if g is not None and p.grad is not None:
                p.grad += g
        return changed

    seen = patch.object(
        HookManager, "_reached", lambda self, name, parameter, g: self.recorder.reached(parameter)
    )
    not_looked = patch.object(OptimizerHooks, "_turn", looked_away)
    with seen, not_looked, patch.object(OptimizerHooks, "_before_step", before_step):
        yield


@contextmanager
def second_backward_counts() -> Iterator[None]:
    honest = Engine._close

    def close(self: Engine, finished: BackwardPass) -> None:
        rows = self.rows_open
        honest(self, finished)
        self.rows_open = rows

    with (
        patch.object(Engine, "_close", close),
        patch.object(Engine, "require_all_closed", lambda self: None),
    ):
        yield


# ---- sampling -----------------------------------------------------------------------------------


def drawn_by(
    make: Callable[[], Callable[[PoissonSampling, KeyStream, int], Indices]],
) -> AbstractContextManager[Any]:
    return patch.object(PoissonSampling, "draw", make())


def shuffled() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    order: list[int] = []

    def draw(self: PoissonSampling, coins: KeyStream, records: int) -> Indices:
        size = round(self.sample_rate * records)
        if len(order) < size:
            order[:] = permutation(coins, records).tolist()
        batch = np.sort(order[:size])
        del order[:size]
        return batch.astype(np.int64)

    return draw


def fixed_size() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    return lambda self, coins, records: np.sort(
        permutation(coins, records)[: round(self.sample_rate * records)]
    )


def same_batch_each_step() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    kept: dict[int, Indices] = {}
    return lambda self, coins, records: kept.setdefault(
        records, coins.coins(records, self.sample_rate)
    )


def one_coin_for_all() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    return lambda self, coins, records: np.arange(
        records if len(coins.coins(1, self.sample_rate)) else 0
    )


def empty_redrawn() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    def draw(self: PoissonSampling, coins: KeyStream, records: int) -> Indices:
        while not len(batch := coins.coins(records, self.sample_rate)):
            pass
        return batch

    return draw


def too_often() -> Callable[[PoissonSampling, KeyStream, int], Indices]:
    return lambda self, coins, records: coins.coins(records, min(1.0, 1.5 * self.sample_rate))


def last_left_out() -> AbstractContextManager[Any]:
    """Of a batch that is too large the last records are left out, so that the first have another
    chance than is charged.
    """
    return patch.object(
        TruncatedPoissonSampling,
        "draw",
        lambda self, coins, records: PoissonSampling.draw(self, coins, records)[: self.most],
    )


def filled_up() -> AbstractContextManager[Any]:
    """Batches that are too small are filled up, as hardware likes them."""
    return patch.object(
        TruncatedPoissonSampling,
        "draw",
        lambda self, coins, records: np.sort(permutation(coins, records)[: self.most]),
    )


def permutation(coins: KeyStream, records: int) -> Indices:
    words = np.empty(records, np.uint64)
    coins.words(words)
    return np.argsort(words)


def empty_skipped() -> AbstractContextManager[Any]:
    honest = MicrobatchSampler.microbatches

    def microbatches(self: MicrobatchSampler) -> Iterator[Indices]:
        for indices in honest(self):
            if self.drawn[-1].null:
                self.drawn.pop()
            else:
                yield indices

    return patch.object(MicrobatchSampler, "microbatches", microbatches)


def placeholder_counted() -> AbstractContextManager[Any]:
    honest = Engine.begin_microbatch

    def begin_microbatch(self: Engine, records: int, **announced: Any) -> None:
        honest(self, records, **{**announced, "null": False})

    return patch.object(Engine, "begin_microbatch", begin_microbatch)
