"""Trials of a way of keeping records apart, on made-up records."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError, SamplesInteractError, quoted
from dpoptim.gradients.expected_sums import LEAST_BOUND, ClippedSums
from dpoptim.gradients.isolation import WHOLE_MODEL, Choice, Isolation
from dpoptim.gradients.layers.bare import OutsideUseError
from dpoptim.gradients.layers.vmapped import NotVectorisedError
from dpoptim.gradients.oracle import RecordsAlone, engine_sums, trainable
from dpoptim.gradients.placement import Placement
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.trials.compared_numbers import compared_numbers, with_numbers
from dpoptim.training.trials.deterministic_runs import other_weights
from dpoptim.training.trials.isolation_fallback import Failure
from dpoptim.training.trials.isolation_words import first_sentence, fix_of
from dpoptim.training.trials.made_up_records import Sample
from dpoptim.training.trials.other_numbers import AGREE, Runs, sizes_in, sizes_of_batches
from dpoptim.training.trials.picked_positions import layers_of_picked
from dpoptim.training.trials.probe import positions_per_layer
from dpoptim.training.trials.tolerances import TOLERANCE, computed_dtypes, settled, tolerance_of
from dpoptim.training.trials.wider_copies import reads, widened

PICKED = "data pick, by a mask or by lengths, which positions layers see"
IN_THEIR_ORDER = "keep records in their order (pack_padded_sequence(..., enforce_sorted=False))"
BY_NUMBERS = (
    "the model branches on a number of the whole batch, or is limited by one, such as its largest"
)
PADDED = "with numbers in records by which the model tells padding, or the like, "


@contextmanager
def of_one_record() -> Iterator[None]:
    """Where a model that took several records is given one of them.

    Raises:
        SamplesInteractError: it does not take it.
    """
    try:
        yield
    except (PrivacyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's model raises
        raise SamplesInteractError(
            f"the model takes several records, but raised {type(error).__name__} on one of them "
            "alone. Usual causes: a batch of one that loses its first axis in squeeze(); a state "
            "that is kept from the batch before. Fix: squeeze(1), or whichever axis is meant; let "
            "each forward pass begin anew. Batches are drawn by coins, and may have one record."
        ) from error


class Trials:
    """Clipped sums of made-up records, compared with those of batches of one."""

    def __init__(self, model: nn.Module, sample: Sample, placement: Placement) -> None:
        self.model, self.sample, self.placement = model, sample, placement
        with torch.no_grad():
            outputs: list[Tensor] = []
            dtypes = computed_dtypes(model, lambda: outputs.extend(sample.outputs(model)))
            self._weights = [torch.randn_like(out) for out in outputs]
        # what is frozen may be stored in fewer digits than what is trained
        self._tolerance = tolerance_of(model, placement, dtypes)
        self._least = tolerance_of(model, placement, ())
        alone = [self._part(range(i, i + 1)) for i in range(sample.rows)]
        gradients = RecordsAlone(model, self._loss, alone, placement)
        with of_one_record():
            self._truth = gradients.clipped_sums(range(sample.rows), "sum")
        self.finite = bool(gradients.squared.isfinite().all())
        self._unclipped: dict[str, float] = {}  # what `_shares` found last where nothing is clipped
        # of a model that no process holds whole, by formulas that keep no record's gradients
        positions = positions_per_layer(model, sample) if placement.spread else None
        self._sums = partial(engine_sums, placement=placement, positions=positions)

    def failure(self, isolation: Isolation) -> Failure | None:
        """Why this way does not give each record its own gradient; None if it does."""
        shares = dict[str, float]()

        def agrees() -> bool:
            shares.update(self._shares(isolation))
            how = partial(self._elsewhere, isolation), partial(self._agrees_in_float64, isolation)
            agreed = settled([*shares.values()], *how, self._tolerance)
            return agreed and self._agrees_in_all_digits(isolation, shares)

        found = self._outcome(isolation, agrees)
        if isinstance(found, Failure):
            return found
        if found:
            return None
        wrong = [name for name, share in shares.items() if not share <= 1]
        # a norm that is off moves all parameters where it is clipped
        wrong = [name for name in wrong if not self._unclipped.get(name, 0.0) <= 1] or wrong
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in wrong))
        return Failure(
            f"the gradient of {wrong[-1]!r} was not each record's own",
            modules,
            fix="keep records on the first axis of every layer, and call layers rather than use "
            "their parameters",
        )

    def _agrees_in_all_digits(self, isolation: Isolation, shares: dict[str, float]) -> bool:
        """Whether what few digits may hide is rounding, told by a copy that has all of them.

        Only where something was off by more than what is trained may round, and a copy can be made
        and run; else few digits have to do.

        Args:
            shares: distances in tolerances; those of the copy where it disagrees.
        """
        rounded = self._tolerance / self._least
        if rounded <= 1 or all(share * rounded <= 1 for share in shares.values()):
            return True
        copied = widened(self.model)
        if copied is None:
            return True
        try:
            trials = Trials(copied, self.sample, self.placement)
            found = trials._shares(isolation)
        except Exception:  # whatever the user's model raises in other dtypes
            return True
        how = partial(trials._elsewhere, isolation), partial(trials._agrees_in_float64, isolation)
        if trials._tolerance > self._least or settled([*found.values()], *how, self._least):
            return True
        shares.update(found)
        return False

    def _agrees_in_float64(self, isolation: Isolation) -> bool:
        """Whether a copy of the model that computes in float64 gives each record its own gradient.

        Only of what computes in float32; no ReLU is turned by rounding there.
        """
        if self._tolerance > TOLERANCE[torch.float32] or self.placement.used:
            return False
        copied = widened(self.model, torch.float64)
        if copied is None:
            return False
        try:
            sample = self.sample.widened()
            with torch.enable_grad():
                if reads(sample.call(copied), self.model):
                    return False
            trials = Trials(copied, sample, self.placement)
            shares = trials._shares(isolation).values()
        except Exception:  # whatever the user's model raises in other dtypes
            return False
        # a copy that is not what computes has no gradients
        computes = trials._tolerance == TOLERANCE[torch.float64]
        computes = computes and min(each.clip_norm for each in trials._truth) > LEAST_BOUND
        return computes and all(share <= 1 for share in shares)

    def raised(self, isolation: Isolation) -> Failure | None:
        """Why this way cannot be run; None if it can, whatever it gives."""
        found = self._outcome(isolation, lambda: bool(self._shares(isolation)))
        return found if isinstance(found, Failure) else None

    def _outcome(self, isolation: Isolation, run: Callable[[], bool]) -> bool | Failure:
        """Result of a run of this way, or the failure that it stands for where it raises."""
        try:
            self.placement.refuse(isolation)
            return run()
        except SamplesInteractError:
            raise
        except PrivacyError as error:
            known = error.layer is not None and error.layer in dict(self.model.named_modules())
            return Failure(
                first_sentence(str(error)),
                (error.layer or WHOLE_MODEL,) if known else (),
                outside=known and isinstance(error, OutsideUseError),
                unvectorised=isinstance(error, NotVectorisedError),
                fix=fix_of(str(error)),
            )
        except Exception as error:  # whatever the user's model raises when it is run in another way
            return Failure(quoted(error))

    @staticmethod
    def refusal(failure: Failure, choice: Choice) -> PrivacyError:
        """The refusal of a way that was chosen by name, and failed."""
        if failure.unvectorised or failure.outside:
            fix = f"{failure.fix}; or " if failure.fix else ""
            why = f"isolation={choice!r} does not serve this model: {failure.reason}. Fix: "
            return PrivacyError(f'{why}{fix}isolation="auto", which finds another way.')
        return SamplesInteractError(
            "records are mixed, or the first axis of some layer is not the record: "
            f"{failure.reason}. Usual causes: positions of shape (T,) instead of (1, T), a "
            "(T, B, ...) layout, records sorted by length to be packed. Fix: "
            'isolation="auto", which finds another way; or keep the batch axis first, and records '
            "in their order (pack_padded_sequence(..., enforce_sorted=False))."
        )

    def _part(self, indices: range) -> tuple[Sample, list[Tensor]]:
        weights = [w[indices.start : indices.stop] for w in self._weights]  # views: these are large
        return self.sample.records(list(indices)), weights

    @staticmethod
    def _loss(model: nn.Module, batch: tuple[Sample, list[Tensor]]) -> Tensor:
        sample, weights = batch
        terms = [(out * w).sum() for out, w in zip(sample.outputs(model), weights, strict=True)]
        return torch.stack([term.to(terms[0].device, terms[0].dtype) for term in terms]).sum()

    def runs(self, count: int, apart: tuple[nn.Module, ...]) -> Runs:
        """Runs of so many of the records, in turn, which look for numbers of the batch.

        Args:
            apart: modules in which no record meets another.
        """
        indices = [i % self.sample.rows for i in range(count)]
        batch = self.sample.records(indices), [w[indices] for w in self._weights]
        within = max(AGREE, self._tolerance)
        return Runs(
            self.model, self.placement, lambda: self._loss(self.model, batch), count, within, apart
        )

    def _elsewhere(self, isolation: Isolation, seed: int) -> list[float]:
        """Distances with other weights, in tolerances."""
        with other_weights(self.model, seed):
            return [*Trials(self.model, self.sample, self.placement)._shares(isolation).values()]

    def _shares(self, isolation: Isolation) -> dict[str, float]:
        """By how many tolerances each parameter's sums are off, under the worse bound."""
        shares = dict.fromkeys(trainable(self.model), 0.0)
        for truth in self._truth:
            found = self._under(truth, isolation)
            if truth is max(self._truth, key=lambda each: each.clip_norm):
                self._unclipped = dict(found)
            for name, share in found:
                shares[name] = share if math.isnan(share) else max(shares[name], share)
        return shares

    def _under(self, truth: ClippedSums, isolation: Isolation) -> list[tuple[str, float]]:
        rows, clipping = self.sample.rows, Clipping(truth.clip_norm)
        given = self.model, self._loss, self._part(range(rows)), rows, clipping
        found = truth.distances(self._sums(*given, "sum", isolation), self.placement)
        allowed = truth.clip_norm * rows * self._tolerance
        named = zip(trainable(self.model), found, strict=True)
        return [(name, each / allowed) for name, each in named]


def with_padding(model: nn.Module, trials: Trials, isolation: Isolation) -> Failure | None:
    """Why this way fails for records with numbers that the model looks for in them.

    None if it does not, or cannot be tried: where the model looks for none, or raises on them.
    """
    if isolation.alone or isolation.enforced:
        return None
    try:
        if not (numbers := compared_numbers(model, trials.sample)):
            return None
        padded = Trials(model, with_numbers(trials.sample, numbers), trials.placement)
    except Exception:  # whatever the user's model raises on such input
        return None
    failure = padded.failure(isolation) if padded.finite else None
    return failure and replace(failure, reason=PADDED + failure.reason, fix=IN_THEIR_ORDER)


def on_other_records(
    model: nn.Module, trials: Trials, isolation: Isolation
) -> tuple[Isolation, Failure | None]:
    """This way, or less of it, and why it fails for other records, if it does.

    Those with gaps or padding, or with which numbers of the whole batch are others.
    """
    isolation, failure = without_gaps(model, trials, isolation)
    failure = failure or with_padding(model, trials, isolation)
    return isolation, failure or with_other_numbers(model, trials, isolation)


def with_other_numbers(model: nn.Module, trials: Trials, isolation: Isolation) -> Failure | None:
    """Why this way fails where other records move a number of the batch; None if it does not.

    Such as its largest output, by which all are limited beyond a size that made-up ones have not.
    """
    if isolation.alone or isolation.enforced:
        return None
    apart = (*map(model.get_submodule, isolation.apart),)
    given = pytree.tree_leaves((trials.sample.args, trials.sample.kwargs))
    leaves = [t for t in given if isinstance(t, Tensor)]
    tensors = (*model.parameters(), *model.buffers())
    taken = sizes_in(tensors) | {size for t in leaves for size in t.shape} - {trials.sample.rows}
    counts = sizes_of_batches(taken, trials.sample.rows)
    try:
        for count in itertools.islice(counts, 2):
            runs = trials.runs(count, apart)
            if not runs.watched(inside=True).decided or not runs.decided(inside=True):
                return None
    except Exception:  # whatever the user's model raises in batches of another size
        return None
    return Failure(BY_NUMBERS, fix="decide by each record's own number")


def without_gaps(
    model: nn.Module, trials: Trials, isolation: Isolation
) -> tuple[Isolation, Failure | None]:
    """This way without what rests on masks that have no gaps, and why that fails, if it does.

    Positions that a mask selects, of all records in a row, look folded where the mask has no gaps.
    """
    if not isolation.folds and not isolation.windows:
        return isolation, None
    layers, picked = layers_of_picked(model, trials.sample)
    if picked:
        folded, interleaved = isolation.folded - layers, isolation.interleaved - layers
        isolation = replace(isolation, folded=folded, interleaved=interleaved, windows=False)
        if (failure := trials.failure(isolation)) is not None:
            return isolation, replace(failure, reason=f"{PICKED}: {failure.reason}")
    return isolation, with_gaps(model, trials, isolation) if isolation.folds else None


def with_gaps(model: nn.Module, trials: Trials, isolation: Isolation) -> Failure | None:
    """Why this way fails for records with masks; None if it does not, or cannot be tried."""
    try:
        gaps = Trials(model, trials.sample.with_gaps(), trials.placement)
    except Exception:  # whatever the user's model raises on such input
        return None
    return gaps.failure(isolation) if gaps.finite else None
