"""The engine's clipped sum of a batch, held against its records taken one at a time."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import NotByThisWayError, PrivacyError, SamplesInteractError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.expected_sums import ClippedSums
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import Loss, RecordsAlone, engine_sums, trainable, worst_mismatch
from dpoptim.gradients.placement import Placement
from dpoptim.gradients.rows_of_records import RowsOfRecords
from dpoptim.noise.few_rows import Vector, memory_of
from dpoptim.training.losses.meeting_places import refuse_meeting
from dpoptim.training.other_libraries import hint_of
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.deterministic_runs import MOVED, other_weights
from dpoptim.training.trials.interactions import (
    mixed_records,
    none_finite,
    nothing_alone,
    weighed_by_others,
    weighted_mean,
)
from dpoptim.training.trials.isolation_words import first_sentence, fix_of
from dpoptim.training.trials.tolerances import TOLERANCE, settled
from dpoptim.training.trials.wider_copies import reads, widened

LOST = torch.finfo(torch.float32).eps  # of the longest gradient, in float32
NOTHING = 1e-6  # of the batch's gradient
ROUNDED = 1e-4  # a longer gradient is none that rounding makes of nothing
ADDED = 0.3  # of a tolerance: autograd's gradients, of which none is clipped, round by less
EXPLAINED = 1e-4  # of the batch's gradient may be left, by words that name weights
LEAST_SIZE = 1e-30  # of what is compared
ONCE = "call the model on the whole batch, so that each layer has the records on its first axis"

ONE_NUMBER = "grad can be implicitly created only for scalar outputs"
OWN_LOSS = (
    "the model returns the loss of a batch as one number, and one for each record where it is "
    "vectorised. Fix: let it return what the loss is made of, or one loss for each record."
)


def meant_by(error: Exception) -> PrivacyError:
    """The refusal that an error stands for, raised under hooks by what runs without them."""
    if isinstance(error, PrivacyError):
        return error
    own = ONE_NUMBER in str(error)
    hint = OWN_LOSS if own else hint_of(error, error.__traceback__)
    return PrivacyError(hint or f"{type(error).__name__} was raised where layers were hooked.")


class Comparison:
    """One batch, and its records one at a time, under a bound that clips and one that does not.

    Args:
        loss: of a batch, as a scalar.
        batches: of the records.
        ways: of keeping records apart, see `Program`; none: records pass alone.
        placement: of the model's parameters.
        on_private: whether the records are private; then no error names a parameter.
        tolerance: `tolerance_of` the model.

    Clipping shows whether the norms are each record's own; without it, a sum read as a mean is off
    by the batch size.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        ways: Sequence[Isolation],
        placement: Placement,
        on_private: bool,
        tolerance: float,
    ) -> None:
        self.model, self.loss, self.rows = model, loss, len(batches.order)
        self._batches, self._order, self._ways = batches, batches.order, ways
        self._placement, self._on_private, self._tolerance = placement, on_private, tolerance
        self._gradients = self._alone()

    def take_alone(self, reduction: Reduction) -> None:
        """Take the gradients of the records alone, which `reduction` needs; by it, their losses."""
        self._gradients.clipped_sums(self._order, reduction)

    def reduction(self, candidates: tuple[Reduction, ...]) -> Reduction:
        """The candidate under which engine and truth agree.

        With no way at all, the one by which autograd's gradient of the batch is its records' own.

        Raises:
            NotByThisWayError: none does, but autograd's gradient of the batch is that of its
                records alone.
            NothingAloneError: none does, as these have none.
            SamplesInteractError: none does.
        """
        gradients, worst, refused = self._gradients, "", None
        for way in self._ways:
            try:
                for candidate in candidates:
                    found = self._off(gradients, candidate, way)
                    if found is None:
                        return candidate
                    worst = found or worst
            except SamplesInteractError:
                raise
            except Exception as error:  # whatever the user's code raises under hooks
                refused = refused or meant_by(error)
        added = next((each for each in candidates if self._adds_up(gradients, each)), None)
        if added is None:
            raise self._mixed(gradients, worst, refused)
        if self._ways:
            raise self._not_by_this_way(worst, refused)
        return added

    def shows_nothing(self) -> bool:
        """Whether no record alone has a gradient, down to rounding: nothing can be compared."""
        squared = self._gradients.squared
        own = largest_of(squared)
        if own > ROUNDED or not squared.isfinite().any():
            return False
        if own == 0:
            return True
        try:  # in float64 there is next to nothing left of what is rounding
            wide = self._widened()
            return wide is not None and largest_of(wide._gradients.squared) <= NOTHING * own
        except Exception:  # whatever the user's code raises in other dtypes
            return False

    def _mixed(
        self, gradients: RecordsAlone, worst: str, refused: PrivacyError | None
    ) -> PrivacyError:
        """The refusal of a loss whose batch has another gradient than its records.

        Args:
            refused: by what it was under hooks; what a layer asks for mends no such loss.
        """
        if self._nothing_alone(gradients):
            return nothing_alone()
        if not worst and refused is not None and refused.layer is None:
            return refused
        if not self._on_private:  # of which a graph may tell something
            refuse_meeting(self.loss(self.model, self._batches.of(self._order)), self.rows)
        weights = self._weights(gradients)
        if weights is not None and abs(float(weights.sum()) - 1) < 1e-3:
            return weighted_mean()
        # in few dimensions gradients make up anything
        many = sum(p.numel() for p in trainable(self.model).values()) > len(self._batches.records)
        if weights is not None and many and not self._on_private:
            return weighed_by_others()
        return self._somewhere(worst)

    def _somewhere(self, worst: str) -> SamplesInteractError:
        """The refusal of gradients that differ at some parameter; which depends on the records."""
        most = "" if self._on_private or not worst else f", most at parameter {worst!r}"
        return mixed_records(self.rows, most)

    def _off(self, gradients: RecordsAlone, reduction: Reduction, way: Isolation) -> str | None:
        """The parameter whose sums are off in this way; None: none is; "": the loss is."""
        if way.enforced and not self._adds_up(gradients, reduction):
            return ""  # apart, but not what it says: each record would be normalised by itself, say
        found = self._mismatches(gradients, reduction, way)
        again = partial(self._elsewhere, reduction, way)
        in_float64 = partial(self._agrees_in_float64, gradients, reduction, way)
        lost = [self._lost(gradients, truth) for truth in self._truth(gradients, reduction)]
        if settled([share for _, share in found], again, in_float64, self._tolerance, lost):
            return None
        return next(name for name, share in found if not share <= 1)

    def _truth(self, gradients: RecordsAlone, reduction: Reduction) -> list[ClippedSums]:
        return gradients.clipped_sums(self._order, reduction)

    def _lost(self, gradients: RecordsAlone, truth: ClippedSums) -> float:
        """Rounding of the longest gradient, in tolerances of a bound."""
        return LOST * largest_of(gradients.squared) / (truth.clip_norm * self._tolerance)

    def _agrees_in_float64(
        self, gradients: RecordsAlone, reduction: Reduction, way: Isolation
    ) -> bool:
        """Whether a copy that computes in float64 agrees, where there is one of the same model."""
        try:
            other = self._widened()
            if other is None:
                return False
            alone = other._alone()
            shares = [share for _, share in other._mismatches(alone, reduction, way)]
        except Exception:  # whatever the user's code raises in other dtypes
            return False
        # a loss that does not compute by the copy, or by other rules there, has other gradients
        norms = alone.squared.sqrt(), gradients.squared.sqrt().to(alone.squared)
        same = torch.allclose(*norms, rtol=MOVED, atol=LOST * largest_of(gradients.squared))
        return same and all(share <= 1 for share in shares)

    def _widened(self) -> "Comparison | None":
        """The same by a copy that computes in float64; None where there is none."""
        if self._tolerance > TOLERANCE[torch.float32] or self._placement.used:
            return None
        copied = widened(self.model, torch.float64)
        if copied is None:
            return None
        wide = self._batches.widened()
        how = self._ways, self._placement, self._on_private, TOLERANCE[torch.float64]
        if reads(self.loss(copied, wide.together), self.model):
            return None
        return Comparison(copied, self.loss, wide, *how)

    def _not_by_this_way(self, worst: str, refused: PrivacyError | None) -> NotByThisWayError:
        error = self._somewhere(worst) if worst or refused is None else refused
        reason = first_sentence(str(error)).split(". Usual causes: ", maxsplit=1)[0]
        vectorised = any(way.tier == "vmap" for way in self._ways)
        named = '"alone"' if vectorised else '"vmap", or "alone"; "auto" finds out which'
        return NotByThisWayError(
            f"{error} Or attach in a slower way, which suits this loss, as "
            f"each record's gradient is its own: isolation={named}, where a record has one row.",
            reason=reason,
            fix=ONCE if isinstance(error, SamplesInteractError) else fix_of(str(error)),
        )

    def _finite(self, gradients: RecordsAlone) -> list[int]:
        """The batch's order without records whose gradients by themselves are not finite.

        The engine leaves them out.
        """
        finite = gradients.squared.isfinite().tolist()
        return [i for i in self._order if finite[i]]

    def _together(self, order: Sequence[int]) -> list[Tensor]:
        """The gradient of a batch as autograd has it: float64, this process's parts."""
        parameters = list(trainable(self.model).values())
        loss = self.loss(self.model, self._batches.of(order))
        return [g.double() for g in self._placement.gradients(loss, parameters)]

    def _norm(self, parts: Sequence[Tensor]) -> float:
        squared = torch.stack([part.norm().square().cpu() for part in parts])
        return float(self._placement.added(squared).sum().sqrt())

    def _adds_up(self, gradients: RecordsAlone, reduction: Reduction) -> bool:
        """Whether the batch's gradient is the mean or sum of the records' own, but for rounding.

        Not where a term of little weight is of the batch, such as the entropy of its mean
        prediction, or the balance of experts.
        """
        order = self._finite(gradients)
        if len(order) < len(self._order) and math.isfinite(self._norm(self._together(self._order))):
            return False  # the batch makes something of what is nothing, such as 0 / 0, alone
        if not order:
            return True  # there is nothing to add up

        def again(seed: int) -> list[float]:
            with other_weights(self.model, seed):
                return [self._rest(self._alone(), order, reduction)]

        def in_float64() -> bool:
            try:
                wide = self._widened()
                return wide is not None and wide._rest(wide._alone(), order, reduction) <= 1
            except Exception:  # whatever the user's code raises in other dtypes
                return False

        share = self._rest(gradients, order, reduction)
        return settled([share], again, in_float64, self._tolerance)

    def _rest(self, gradients: RecordsAlone, order: Sequence[int], reduction: Reduction) -> float:
        """The rest of the batch's gradient beside the records' own, in tolerances of their size."""
        rest: list[Vector] = [*self._together(order)]
        share = 1 / len(order) if reduction == "mean" else 1.0
        counts = [order.count(i) for i in range(len(self._batches.records))]
        gradients.subtract(rest, [share * count for count in counts])
        size = share * float(gradients.squared[order].sqrt().sum())
        rounds = self._tolerance > TOLERANCE[torch.float32]
        allowed = size * (self._tolerance if rounds else ADDED * self._tolerance)
        return self._norm(memory_of(rest)) / max(allowed, LEAST_SIZE)

    def _nothing_alone(self, gradients: RecordsAlone) -> bool:
        """Whether the batch has a gradient, and no record alone, down to rounding."""
        own = largest_of(gradients.squared[self._order])
        return own <= NOTHING * self._norm(self._together(self._order))

    def _weights(self, gradients: RecordsAlone) -> Tensor | None:
        """By which the batch's gradient is made of the records' own; None: it is not, above 0."""
        order = self._finite(gradients)
        target = torch.cat([part.flatten().cpu() for part in self._together(order)])
        if not order:
            return None
        rows = torch.cat([g.double().reshape(len(g), -1).cpu() for g in gradients.stacked()], 1)
        rows, added = rows[order], self._placement.added
        inverse = torch.linalg.pinv(added(rows @ rows.T), hermitian=True, rtol=1e-9)
        weights = inverse @ added(rows @ target)
        explained = self._norm([weights @ rows - target]) <= EXPLAINED * self._norm([target])
        return weights if explained and bool((weights > 0).all()) else None

    def _alone(self) -> RecordsAlone:
        return RecordsAlone(self.model, self.loss, self._batches.alone, self._placement)

    def _elsewhere(self, reduction: Reduction, way: Isolation, seed: int) -> list[float]:
        """Distances with other weights, in tolerances."""
        with other_weights(self.model, seed):
            return [share for _, share in self._mismatches(self._alone(), reduction, way)]

    def _mismatches(
        self, gradients: RecordsAlone, reduction: Reduction, way: Isolation
    ) -> list[tuple[str, float]]:
        """The worst parameter, and by how many tolerances, under both bounds."""
        truth = self._truth(gradients, reduction)
        if not gradients.squared[self._order].isfinite().any():
            raise none_finite()
        return [self._mismatch(each, reduction, way) for each in truth]

    def _mismatch(
        self, truth: ClippedSums, reduction: Reduction, way: Isolation
    ) -> tuple[str, float]:
        # a loss reduces a record's rows as it reduces all
        rows = RowsOfRecords(len(self._batches.records[0]), reduction)
        ours = engine_sums(
            self.model,
            self.loss,
            self._batches.together,
            self.rows,
            Clipping(truth.clip_norm),
            reduction,
            way,
            rows,
            self._placement,
        )
        found = truth.distances(ours, self._placement)
        worst, distance = worst_mismatch(dict(zip(trainable(self.model), found, strict=True)))
        allowed = truth.clip_norm * self.rows * self._tolerance
        return worst, distance / allowed


def largest_of(squared: Tensor) -> float:
    """The largest finite norm; 0: there is none."""
    return float(squared.where(squared.isfinite(), 0).max().sqrt())
