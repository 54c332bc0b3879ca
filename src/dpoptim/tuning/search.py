"""Hyperparameters chosen on private data, at a price that does not grow with the candidates.

Before spending anything, tune on public or made-up data like yours: that is free, and usually as
good.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import MetaEstimatorMixin, clone, is_classifier
from sklearn.model_selection import ParameterGrid
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.gaussian import gdp_epsilon, gdp_mu
from dpoptim.accounting.guarantee import SEEDED, Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of, stated_delta
from dpoptim.arguments import positive_number, whole_number
from dpoptim.distributed.ranks import Ranks
from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.fitting import Given
from dpoptim.estimators.persons import per_person, units_in
from dpoptim.estimators.repeats import CountsFits, Fit, label_of, uncounted
from dpoptim.estimators.shards import SAME_TABLE, agree_on_all, all_ranks
from dpoptim.estimators.table import READ_OFF, classes_in
from dpoptim.estimators.weights import notes_of_weights
from dpoptim.gate.one_process import alone
from dpoptim.noise.stream import KeyStream
from dpoptim.training.batches.persons_of_ranks import one_rank_a_person
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.tuning.affordable import trials_gate
from dpoptim.tuning.records import Records, held_out_units, noisy_score
from dpoptim.tuning.search_event import search_event

UNTIMED = "on trust: nobody learns from running times how many trials there were"
LEFT = 1 - 1e-9


class DPSearchCV(MetaEstimatorMixin, CountsFits):
    """Search over settings of a linear estimator, with scikit-learn's manners.

    Each trial draws a candidate, trains on one part of the records, and scores on the rest with
    noise. The number of trials is random and stays unknown; the best trial's model, settings and
    score are all that is kept. There is no refit: it would cost again.

    Args:
        estimator: `DPLogisticRegression` or `DPLinearRegression`: every candidate's fit must be
            one Gaussian event at the same epsilon, whatever else it sets. Its own epsilon and delta
            are not used, as a warning says of an epsilon that was set.
        param_grid: as for ``GridSearchCV``; public, and not of the estimator's budget. ``[{},
            {"steps": [5, 20]}]`` has the estimator as it is among the candidates.
        epsilon, delta: of the whole search; delta ``"auto"``: at most 1e-5 and 1/(10 n).
        mean_trials: expected number of trials, > 1. Far fewer are likely: twice the candidates try
            the best of them in about half of the searches.
        holdout: share of the records that score, in (0, 1).
        random_state: of the division of records into parts, a whole number; public. Persons are
            divided by secret coins.
        ledger: where the search is charged, as one event; None: nowhere.
        label: public text for the ledger's entry; None: the class's name and the estimator's.
        noise_seed: repeatable noise and trials, for tests.

    Attributes:
        best_estimator_, best_params_: of the winner, trained on ``1 - holdout`` of the records.
        best_score_: its noisy score (accuracy, or minus the squared error in units of the target's
            bound); as the best of several it is more likely too high than too low.
        privacy_: `Guarantee` of all of these.

    **Guarantee.** ``privacy_``, for every table, per record or, with ``persons``, per person
    (Papernot and Steinke 2022, Theorem 2, by dp_accounting's ``RepeatAndSelectDpEvent``, reserved
    before the first trial). A trial is mu-GDP: one in the training part is seen by the fit, mu-GDP,
    of which the score is a post-processing for it; one in the hold-out is seen by the score alone,
    a Gaussian of mu, in which a person counts by the mean over the person's rows. So the trial
    costs mu once, not twice, if no neighbour moves others between the parts. A record's part is
    public, by its place alone. A person has no place that others' do not depend on: who replaces
    one has other rows. So a uniformly random, secret permutation divides persons: with who replaces
    a person in that person's part, everybody else's is as likely; given the parts each trial is
    mu-GDP, and a mixture over secret coins distinguishes no better than its parts.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPLogisticRegression
        >>> from dpoptim.tuning import DPSearchCV
        >>> search = DPSearchCV(
        ...     DPLogisticRegression(classes=[False, True]),
        ...     {"l2": [0.0, 0.1]},
        ...     epsilon=4.0,
        ...     mean_trials=3,
        ... )
        >>> search.fit(x, x[:, 0] > 0).privacy_.epsilon <= 4.0
        True
    """

    privacy_: Guarantee

    def __init__(
        self,
        estimator: Any,
        param_grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]],
        *,
        epsilon: float = 1.0,
        delta: float | Literal["auto"] = "auto",
        mean_trials: float = 10.0,
        holdout: float = 0.2,
        random_state: int = 0,
        ledger: Ledger | None = None,
        label: str | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.epsilon = epsilon
        self.delta = delta
        self.mean_trials = mean_trials
        self.holdout = holdout
        self.random_state = random_state
        self.ledger = ledger
        self.label = label
        self.noise_seed = noise_seed

    @whole_fit
    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, persons: Any = None) -> Self:
        """Search on X of shape (n, features) and y of shape (n,).

        In several processes, which all have the whole table, each makes a part of the trials; one
        reservation pays for all, and losers stay among the processes.

        Args:
            sample_weight: see `DPLogisticRegression.fit`; scores count every row alike.
            persons: the owner of each row, where the guarantee shall protect persons who have
                several: all rows of a person train, or all score.

        Raises:
            ValueError: an estimator, a grid or a setting that the guarantee does not cover, what a
                candidate refuses, or a bad table; before anything is spent.
            RankError: another process has failed, or does not agree.
        """
        with all_ranks() as ranks:
            self._search(Given(X, y, persons, sample_weight), ranks)
        return self

    def _search(self, given: Given, ranks: Ranks) -> None:
        # a table for another estimator would be refused for a reason that is none
        relation, candidates = self._relation(), self._candidates()
        records = Records.of(given, self)
        agree_on_all(self, records.x, records.y, ranks, weights=records.weights)
        classes, read_off = self._classes(records.y)
        owners, n = records.owners, records.units
        unit, _ = units_in(records.x, owners)
        one_rank_a_person(ranks, owners, sharded=False)
        held_out = held_out_units(n, self.holdout, self._coins(owners, ranks))
        held_out = held_out[records.unit_of_rows]
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        delta, said = stated_delta(self.delta, n, epsilon=self.epsilon)
        event = search_event(
            positive_number("epsilon", self.epsilon), delta, relation, self.mean_trials
        )
        base = (2.0 if relation == "replace-one" else 1.0) / event.event.noise_multiplier
        mine: list[tuple[float, int, Any, dict[str, Any]]] = []  # the best of this process
        with Ledger(neighboring=relation) as own:
            gate = trials_gate(
                event,
                ranks.ledger((self.ledger or own).of_units(unit.name)),
                neighboring=relation,
                noise=ranks.common_stream(self.noise_seed, "trials"),
                label=label_of(self._named, self.epsilon, delta),
                of=(self.epsilon, delta, self.mean_trials),
            )

            def fit(
                candidate: dict[str, Any], rows: Any, ledger: Ledger | None, seed: int | None = None
            ) -> Any:
                model = clone(self.estimator).set_params(
                    **candidate,
                    **classes,
                    epsilon=gdp_epsilon(base * LEFT, delta),
                    delta=delta,
                    neighboring=relation,
                    noise_seed=seed,
                    ledger=ledger,
                    warm_start=False,
                )
                with uncounted(), alone():
                    return records.fitted(model, rows)

            # what is refused of the table, held-out rows too, or of a candidate, costs nothing
            gate.rehearse(partial(fit, candidates[0], slice(None)))
            for candidate in candidates:
                gate.rehearse(partial(fit, candidate, train))
            drawn = list(enumerate(gate.draw(len(candidates))))
            with without_warnings():
                for number, chosen in drawn[ranks.rank :: ranks.size]:
                    seed = None if self.noise_seed is None else 1000 * self.noise_seed + number
                    model = fit(candidates[chosen], train, None, seed)
                    price = base * LEFT
                    with alone():
                        values = records.values(model, test)
                        score = noisy_score(
                            model, values, mu=price, delta=delta, relation=relation, seed=seed
                        )
                    trial = (score, -number, model, candidates[chosen])
                    mine = [max([*mine, trial], key=_by_score)]
            ranks.arrive("its trials")
            found = [each for best in ranks.all_gather(mine) for each in best]
            gate.finish()
        self.best_score_, _, self.best_estimator_, self.best_params_ = max(found, key=_by_score)
        alone_mu = gdp_mu(self.epsilon, delta)
        of_trials = f"each trial is {base:.2g}-GDP, where one fit alone would be {alone_mu:.2g}-GDP"
        notes = (*said, *read_off, *notes_of_weights(records.weights), *self._notes(ranks))
        notes = (*notes, of_trials)
        guarantee = replace(compute_epsilon(event, delta, relation), notes=notes)
        guarantee = per_person(guarantee, owners)
        self.privacy_ = ranks.from_first(lambda: self._counted(Fit(event, guarantee, n)))
        # the trial's own would hide the others
        self.best_estimator_.privacy_ = self.privacy_
        vars(self.best_estimator_).update({k: vars(self).get(k) for k in ("_paid", "_fit_id")})
        if classes:  # as given: another fit of it would read them off its own labels
            self.best_estimator_.set_params(classes=None)
        if is_classifier(self.best_estimator_):
            self.classes_ = self.best_estimator_.classes_
        if hasattr(self, "feature_names_in_"):  # the trials saw an array
            self.best_estimator_.feature_names_in_ = self.feature_names_in_

    def _note_charge(self, run: str | None) -> None:
        super()._note_charge(run)
        self.best_estimator_._note_charge(run)

    @property
    def _named(self) -> str:
        named = f"{type(self).__name__}, {type(self.estimator).__name__}"
        return named if self.label is None else self.label

    def _classes(self, labels: NDArray[Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The setting of all trials, if the estimator was not told classes; what is to be said."""
        if getattr(self.estimator, "classes", ()) is not None:
            return {}, ()
        return {"classes": classes_in(labels, stacklevel=5)}, (READ_OFF,)

    def _notes(self, ranks: Ranks) -> Iterator[str]:
        if ranks.size > 1:
            yield f"searched in {ranks.size} processes; {SAME_TABLE}"
        yield UNTIMED
        if self.noise_seed is not None:
            yield SEEDED

    def _relation(self) -> str:
        settings = self.estimator.get_params(deep=False)
        if not {"epsilon", "delta", "solver", "neighboring", "ledger"} <= settings.keys():
            raise ValueError(
                "estimator must be DPLogisticRegression or DPLinearRegression, got "
                f"{type(self.estimator).__name__}: a search has a known price where each fit "
                "is one Gaussian event, not for steps on sampled batches, nor for several fits in "
                "a row. Fix: fit and charge transformers first, and search on what they make; "
                "or fit a PrivatePipeline on public data like yours with several settings."
            )
        usual = inspect.signature(type(self.estimator)).parameters["epsilon"].default
        if settings["epsilon"] not in (usual, self.epsilon):
            warnings.warn(
                f"the estimator's epsilon={settings['epsilon']!r} is not used: the search shares "
                f"out its own, epsilon={self.epsilon!r}.",
                stacklevel=5,
            )
        relation = relation_of(settings["neighboring"], self.ledger, self.estimator.relations)
        if relation == "add-or-remove-one":
            raise ValueError(
                "neighboring must be 'zero-out' or 'replace-one': records are divided by their "
                "places."
            )
        return relation

    def _coins(self, owners: Persons | None, ranks: Ranks) -> KeyStream:
        """Public coins to divide records, who keep their places; secret ones for persons."""
        public = whole_number("random_state", self.random_state, least=0)
        if owners is None:
            return KeyStream.from_seed(public, "public parts")
        return ranks.common_stream(self.noise_seed, "parts of persons")

    def _candidates(self) -> list[dict[str, Any]]:
        candidates = list(ParameterGrid(self.param_grid))
        reserved = {
            "epsilon",
            "delta",
            "neighboring",
            "ledger",
            "noise_seed",
            "warm_start",
            "classes",
            "target_bound",
            "rows_per_person",
        }
        if named := reserved & {name for candidate in candidates for name in candidate}:
            raise ValueError(
                f"param_grid may not set {sorted(named)}: they belong to the promise, not to the "
                "search."
            )
        return candidates

    def __sklearn_tags__(self) -> Any:
        tags, its = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type, tags.input_tags = its.estimator_type, its.input_tags
        tags.classifier_tags, tags.regressor_tags = its.classifier_tags, its.regressor_tags
        tags.non_deterministic = self.noise_seed is None
        return tags

    def predict(self, X: Any) -> NDArray[Any]:
        """The winner's predictions, shape (n,)."""
        check_is_fitted(self)
        found: NDArray[Any] = self.best_estimator_.predict(X)
        return found

    @available_if(lambda self: hasattr(self.estimator, "predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The winner's probabilities, shape (n, classes)."""
        check_is_fitted(self)
        found: NDArray[np.float64] = self.best_estimator_.predict_proba(X)
        return found

    def score(self, X: Any, y: Any) -> float:
        """The winner's true score on public records; on private ones use `dpoptim.evaluation`."""
        check_is_fitted(self)
        return float(self.best_estimator_.score(X, y))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Let trials warn of nothing: it would tell of those that lost, and of records they scored."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _by_score(trial: tuple[float, int, Any, dict[str, Any]]) -> tuple[float, int]:
    """Order trials by score, of equal ones the first best."""
    return trial[:2]
