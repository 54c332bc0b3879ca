"""A classifier's scores on private records: one vector of counts and bounded sums, one Gaussian.

The hold-out must be apart from the training records, by a rule or coin for each record alone. A
record is then in one of the two, so training and evaluation do not add up for it: the larger
guarantee holds (parallel composition); where the parts share a ledger, it charges both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import public_number_of_records, relation_of, stated_delta
from dpoptim.arguments import real_number, whole_number
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.data.numbers import classes_of
from dpoptim.evaluation.intervals import (
    Interval,
    bin_edges,
    of_a_mean,
    of_the_area,
    parts_of_a_bin,
    variance_of_loss,
)
from dpoptim.evaluation.scored_records import LABEL, Records, kind_of_records, with_notes
from dpoptim.statistics import (
    BOUND_ROUNDING,
    Floats,
    bounded_sum,
    price_of,
    release_sum,
    warn_of_other_labels,
)

Delta = float | Literal["auto"]
LARGEST_LOSS = 4.0  # of a record, in nats: the log-loss is clipped there
# Shares of a record's squared length: for the confusion matrix, for scores in bins, for the
# log-loss.
SHARES = (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class Bin:
    """The share of right records with scores between (two classes: of the second class)."""

    low: float
    high: float
    share: Interval


HIDDEN = "hidden by the noise: too few records of a class at this epsilon"


@dataclass(frozen=True)
class ClassifierScores:
    """Released scores of a classifier; all of it may be published.

    Attributes:
        accuracy, log_loss (clipped at 4 nats a record): with their intervals.
        majority: share of the most frequent class, by the noisy counts: what naming it always would
            be right on. Of classes that are alike in size it reads high, by the noise.
        auc: of two classes; None for more. Its interval holds whatever the order of records is
            whose scores share a bin; these are finer than the histogram's, the more so the more
            records there are beside the noise.
        confusion: noisy counts, shape (classes, classes): true by predicted.
        calibration: by bins of the score: of the second class for two classes, else of the
            predicted class.
        histogram: noisy counts of that score, shape (2, bins), in bins of log-odds, closer towards
            1/2: of records that are not of that class, and of those that are.
        guarantee: of everything here.
    """

    accuracy: Interval
    log_loss: Interval
    majority: Interval
    auc: Interval | None
    confusion: Floats
    calibration: tuple[Bin, ...]
    histogram: Floats
    guarantee: Guarantee

    def __str__(self) -> str:
        lines = [
            f"accuracy  {self.accuracy}",
            f"majority  {self.majority}: naming the most frequent class always",
            f"log-loss  {self.log_loss}",
        ]
        if self.auc is not None:
            lines += [f"AUC       {HIDDEN if self.auc.hidden else self.auc}"]
        return "\n".join([*lines, str(self.guarantee)])


def evaluate_classifier(
    probabilities: Any,
    y: Any,
    *,
    classes: Sequence[Any],
    epsilon: float,
    delta: Delta = "auto",
    bins: int = 20,
    confidence: float = 0.95,
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    label: str = LABEL,
    records: Records | None = None,
    noise_seed: int | None = None,
) -> ClassifierScores:
    """Accuracy, confusion matrix, log-loss, AUC and calibration on private records.

    Args:
        probabilities: of each class for every record, shape (n, classes), as ``predict_proba``
            returns them.
        y: true labels, shape (n,).
        classes: all classes, in the order of the columns; public.
        epsilon, delta: what the evaluation may cost; delta ``"auto"``: at most 1e-5 and 1/(10 n).
        bins: number of bins of scores, in `calibration` and `histogram`; public.
        confidence: of the intervals, in (0, 1).
        neighboring: ``"zero-out"``, ``"replace-one"``, or ``"add-or-remove-one"`` with a public
            ``n``. None: as the ledger counts; else zero-out.
        n: public number of hold-out records, for delta; scores are relative to their noisy number
            where ``n`` does not have to be it.
        ledger: where it is charged; None: nowhere.
        label: public text for the ledger's entry.
        records: ``"hold-out"``, or ``"training"``: among those that the model was trained on. None:
            a hold-out, if the ledger holds evaluations alone.
        noise_seed: repeatable noise, for tests; the guarantee then says that it is not for release.

    Returns:
        noisy scores with their intervals, and the guarantee.

    Raises:
        ValueError: unequal shapes, a setting out of range, or a ledger that holds other charges
            and no ``records``; before anything is spent.

    **Guarantee.** ``guarantee``, for all records and any model that was not trained on them. A
    record adds sqrt(0.6) to one cell of the confusion matrix, sqrt(0.3) to one bin, and at most
    sqrt(0.1) as its log-loss: at most 1 long together, to which each is scaled down. A label or
    row that is none adds nothing.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.evaluation import evaluate_classifier
        >>> y = np.arange(2_000) % 2
        >>> sure = np.where(np.eye(2)[y] > 0, 0.9, 0.1)  # always right
        >>> scores = evaluate_classifier(sure, y, classes=[0, 1], epsilon=1.0)
        >>> scores.accuracy.low > 0.9
        True
    """
    names = np.asarray(classes)
    scores, labels = number_array("probabilities", probabilities), one_axis("y", y)
    if (
        len(names) < 2
        or scores.ndim != 2
        or scores.shape[1] != len(names)
        or labels.shape != (len(scores),)
    ):
        raise ValueError(
            "probabilities must be of shape (n, classes), with one label in y for each row."
        )
    bins, level = whole_number("bins", bins, least=2), real_number("confidence", confidence)
    if not 0 < level < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}.")
    relation = relation_of(neighboring, ledger)
    kind = kind_of_records(records, ledger, label)
    size, mu, number, said = price_and_records(epsilon, delta, n, len(scores), relation)
    places = classes_of(list(classes), labels)
    k = len(names)
    parts = parts_of_a_bin(size, 1 / (mu * math.sqrt(SHARES[1])), bins) if k == 2 else 1
    rows = RowsOfScores(scores, places[:, None] == np.arange(k), parts * bins)
    released = release_sum(
        bounded_sum(rows, 1.0),
        norm_bound=BOUND_ROUNDING,
        mu=mu,
        delta=number,
        neighboring=relation,
        label=label,
        ledger=ledger,
        noise_seed=noise_seed,
    )
    confusion = released.values[: k * k].reshape(k, k) / math.sqrt(SHARES[0])
    fine = released.values[k * k : -1].reshape(2, parts * bins) / math.sqrt(SHARES[1])
    histogram = fine.reshape(2, bins, parts).sum(2)
    # twice what each record's loss is above the middle of its range
    above = released.values[-1] / math.sqrt(SHARES[2])
    in_cells = released.deviation / math.sqrt(SHARES[0])
    in_bins = released.deviation / math.sqrt(SHARES[1])
    in_loss = released.deviation / math.sqrt(SHARES[2])
    right, count, in_count = float(np.trace(confusion)), float(size), 0.0
    in_right = in_cells * math.sqrt(k)
    warn_of_other_labels(float(confusion.sum()), in_cells * k, size)
    if relation == "add-or-remove-one":
        # n says nothing of how many records there are, so their noisy number counts
        count, in_count = max(float(confusion.sum()), 1.0), in_cells * k
        wrong = min(max(1 - right / count, 0.0), 1.0)
        in_right = in_cells * math.sqrt(k * wrong**2 + (k * k - k) * (1 - wrong) ** 2)
    most = float(confusion.sum(1).max())  # noisy, so this looks at no record
    in_most = in_cells * math.sqrt(k)
    if in_count:
        share = min(max(most / count, 0.0), 1.0)
        in_most = in_cells * math.sqrt(k * (1 - share) ** 2 + (k * k - k) * share**2)
    middle = LARGEST_LOSS / 2
    loss = middle * (1 + above / count)
    return ClassifierScores(
        accuracy=of_a_mean(right, count, in_right, confidence=level),
        log_loss=of_a_mean(
            loss * count,
            count,
            math.hypot(in_loss * middle, (loss - middle) * in_count),
            confidence=level,
            high=LARGEST_LOSS,
            variance=variance_of_loss(
                fine,
                count,
                in_bins,
                min(max(loss, 0.0), LARGEST_LOSS),
                largest=LARGEST_LOSS,
                binary=k == 2,
            ),
        ),
        majority=of_a_mean(most, count, in_most, confidence=level),
        auc=of_the_area(fine, in_bins, confidence=level) if k == 2 else None,
        confusion=confusion,
        calibration=_calibration(histogram, in_bins * math.sqrt(parts), level),
        histogram=histogram,
        guarantee=with_notes(released.guarantee, said, kind, ledger),
    )


@dataclass(frozen=True)
class RowsOfScores:
    """`classifier_rows` of some records at a time: all at once would not fit. Private."""

    scores: Floats
    is_class: NDArray[np.bool_]
    bins: int

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.scores.shape[1] ** 2 + 2 * self.bins + 1

    def __getitem__(self, part: slice) -> Floats:
        return classifier_rows(self.scores[part], self.is_class[part], self.bins)


def classifier_rows(scores: Floats, is_class: NDArray[np.bool_], bins: int) -> Floats:
    """Each record's addition, (n, classes^2 + 2 bins + 1); nothing if not finite. Private."""
    n, k = scores.shape
    known: NDArray[np.bool_] = np.asarray(is_class.any(1) & np.isfinite(scores).all(1))
    true, predicted = is_class.argmax(1), np.where(known[:, None], scores, 0.0).argmax(1)
    rows = np.zeros((n, k * k + 2 * bins + 1))
    each = np.arange(n)
    rows[each, true * k + predicted] = math.sqrt(SHARES[0])
    binary = k == 2
    score = np.where(known, scores[:, 1] if binary else scores[each, predicted], 0.0)
    place = np.searchsorted(bin_edges(bins)[1:-1], score, side="right")
    happened = true == 1 if binary else true == predicted
    rows[each, k * k + happened * bins + place] = math.sqrt(SHARES[1])
    chance = np.where(known, np.clip(scores[each, true], math.exp(-LARGEST_LOSS), 1.0), 1.0)
    rows[:, -1] = (-np.log(chance) / LARGEST_LOSS * 2 - 1) * math.sqrt(SHARES[2])
    rows[~known] = 0.0
    return rows


def price_and_records(
    epsilon: float, delta: Delta, n: int | None, rows: int, neighboring: str
) -> tuple[int, float, float, tuple[str, ...]]:
    records = public_number_of_records(n, rows, neighboring)
    number, said = stated_delta(delta, records, epsilon=epsilon)
    return records, price_of(real_number("epsilon", epsilon), number), number, said


def _calibration(histogram: Floats, noise: float, confidence: float) -> tuple[Bin, ...]:
    """Bins that the noise leaves something of."""
    edges = bin_edges(histogram.shape[1])
    found = []
    for i, (other, happened) in enumerate(histogram.T):
        total = other + happened
        if total > 4 * noise:
            share = of_a_mean(float(happened), float(total), noise, confidence=confidence)
            found.append(Bin(float(edges[i]), float(edges[i + 1]), share))
    return tuple(found)
