"""Runs of a model in which other numbers stand for those that a batch makes."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpoptim.gradients.oracle import trainable
from dpoptim.gradients.placement import Placement
from dpoptim.runtime.torch_internals import parts_held
from dpoptim.training.trials.numbers_of_batches import (
    MORE_CALLS,
    SOME_CALLS,
    Change,
    NumbersOfBatches,
)
from dpoptim.training.trials.within_memory import within_memory

# Of the weights, by which losses and outputs are of other sizes, as later in training.
SCALES = (1.0, 30.0, 1000.0, 1e-3)
SIZES = (1e18, 30.0)  # that numbers are moved by
AGREE = 1e-3
LEAST_SIZE = 7  # of batches


@dataclass(frozen=True)
class Runs:
    """Runs of a model on one batch.

    Attributes:
        losses: of the batch, made anew: one a record, or a scalar.
        count: a size, and multiples of it, that no axis has but the records'.
        within: a share of the largest, by which two runs may differ.
        apart: modules that are given one record at a time, whose numbers are none of batches.
    """

    model: nn.Module
    placement: Placement
    losses: Callable[[], Tensor]
    count: int
    within: float = AGREE
    apart: tuple[nn.Module, ...] = ()

    def watched(self, *, inside: bool) -> NumbersOfBatches:
        """Look at a run without other numbers, or at one around the model."""
        mode = NumbersOfBatches(self.count, backwards=inside)
        with self._under(mode, inside=inside):
            losses = self.losses()
            if inside:
                self._gradients(losses)
        return mode

    def decided(self, *, inside: bool) -> bool:
        """Whether other numbers of the batch change what its records add, with some weights.

        Args:
            inside: whether those in the model, and in backward passes, are changed, too, or those
                around it alone.
        """
        for scale in SCALES:
            with scaled_weights(self.model, scale):
                if any(self._changes(inside=inside)):
                    return True
        return False

    def _changes(self, *, inside: bool) -> Iterator[bool]:
        """Whether anything changes, for each change that can be run."""
        mode = NumbersOfBatches(self.count, backwards=inside)
        own = self._numbers(mode, inside=inside)
        if not mode.decided or not all(bool(t.isfinite().all()) for t in own):
            return
        most = MORE_CALLS * mode.calls + SOME_CALLS
        for size, down in itertools.product(SIZES, (False, True)):
            for counts in (True, False):  # by which shapes are, perhaps
                mode = NumbersOfBatches(
                    self.count, Change(size, down, counts, most), backwards=inside
                )
                try:
                    with within_memory():
                        found = self._numbers(mode, inside=inside)
                except Exception:  # whatever the user's code raises on numbers that do not fit
                    continue
                yield not same(own, found, self.within)
                if not mode.sized:  # the other ways change nothing else
                    return
                break

    def _numbers(self, mode: NumbersOfBatches, *, inside: bool) -> list[Tensor]:
        """Results of a run: one loss a record, if there are such; gradients."""
        with self._under(mode, inside=inside):
            losses = self.losses()
            parts = self._gradients(losses)
        several = [losses.detach()] if losses.dim() else []
        return [x.double() for x in (*several, *parts)]

    def _gradients(self, losses: Tensor) -> list[Tensor]:
        return self.placement.gradients(losses.sum(), list(trainable(self.model).values()))

    @contextmanager
    def _under(self, mode: NumbersOfBatches, *, inside: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.apart if inside else (self.model,):
                stack.enter_context(mode.paused_inside(module))
            stack.enter_context(mode)
            yield


def sizes_of_batches(taken: Iterable[int], least: int) -> Iterator[int]:
    """Numbers of records of which no size is a multiple: prime ones.

    Args:
        taken: sizes of axes.
        least: of a batch.
    """
    sizes = {*taken} - {0}
    for size in itertools.count(max(LEAST_SIZE, least)):
        if all(size % n for n in range(2, math.isqrt(size) + 1)) and all(n % size for n in sizes):
            yield size


def sizes_in(tensors: Iterable[Tensor]) -> set[int]:
    return {size for t in tensors for size in t.shape}


def same(ours: Sequence[Tensor], others: Sequence[Tensor], within: float) -> bool:
    """Whether two runs have the same numbers, but for a share of the largest."""
    most = within * max(float(a.norm()) for a in ours)
    return all(float((a - b).norm()) <= most for a, b in zip(ours, others, strict=True))


@contextmanager
def scaled_weights(model: nn.Module, scale: float) -> Iterator[None]:
    """Multiply every parameter, and put it back exactly."""
    held = [part for p in model.parameters() for part in parts_held(p)]
    scaled = [part for part in held if part.is_floating_point()] if scale != 1 else []
    before = [p.detach().clone() for p in scaled]
    try:
        with torch.no_grad():
            for p in scaled:
                p.mul_(scale)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(scaled, before, strict=True):
                p.copy_(value)
