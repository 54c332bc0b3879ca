"""Linear models, private, as in scikit-learn: gradients in closed form, no autograd."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.ranks import Ranks
from dpoptim.estimators.fitting import FitsClasses, FitsNumbers, Given, softmax
from dpoptim.estimators.linear_fit import LinearFit, Run
from dpoptim.estimators.persons import owners_of
from dpoptim.estimators.shards import all_ranks, classes_of_all, own_part
from dpoptim.estimators.table import (
    READ_OFF,
    bounded_targets,
    class_numbers,
    one_label_a_row,
    public_weights,
)
from dpoptim.estimators.target_spread import (
    WHOLE,
    can_be_narrowed,
    price_of_round,
    solve_in_part,
)
from dpoptim.estimators.weights import weights_of_rows
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.target_range import TargetBound, TargetRange


@dataclass(kw_only=True, eq=False, repr=False)
class DPLogisticRegression(FitsClasses, LinearFit):
    """Logistic regression (softmax for several classes) with differential privacy.

    Args:
        epsilon: the budget, > 0. All of it is spent by one ``fit``.
        delta: in (1e-14, 1), or ``"auto"``: at most 1e-5 and 1/(10 n), n being public under
            the neighbouring relations here; said in ``privacy_``.
        data_norm: public bound on the Euclidean norm of a row; longer rows are scaled down to it.
            It must not be read off the data. None: the square root of the number of features,
            which suits features scaled to about [-1, 1] by public constants.
        classes: all classes, as public knowledge. None: read off y, and said so in ``privacy_``.
        class_weight: public factors of the classes' clipped gradients, relative to the largest,
            such as those of `DPClassCounts.class_weight`; a class that is not named has 1.
            "balanced" would be read off the labels, and is refused.
        l2: strength of the penalty l2 |coef|^2 / 2; >= 0.
        fit_intercept: append a 1 to every row.
        solver: ``"auto"``, which is ``"momentum-gd"`` (few full-batch steps); ``"noisy-gd"``,
            ``"kl-spider"``, ``"adaptive-gd"``, ``"proximal-point"``; in a single pass
            ``"accelerated-srgd"``, ``"one-pass-sgd"`` (independent gradients).
        steps, step_size, clip_norm: the solver's; None: from public numbers.
        solver_options: further arguments of the solver's function.
        neighboring: ``"zero-out"`` (a record contributes nothing) or ``"replace-one"``. None: as
            the ledger counts, if it is one of them; else zero-out.
        warm_start: start from the weights of the last fit, whose guarantee then adds up with this
            one's.
        ledger: where fits are charged, so that several cannot exceed a budget; None: nowhere.
        label: public text for the ledger's entry; None: the class's name.
        noise_seed: repeatable noise, for tests: the guarantee says that it is not for release.
        sharded: under ``torch.distributed``, where all processes must call ``fit``: whether each
            has rows of its own, no record, nor rows of one person, in two of them. False: all have
            the same table.
        rows_per_person: where ``fit`` is told ``persons``, at most so many rows of each take part,
            chosen by coins, and their mean counts.
        weight_bound: public; larger entries of ``sample_weight`` are cut to it. Needed with weights
            by ``"sufficient-statistics"``, whose noise it multiplies; elsewhere None is no bound.

    Attributes:
        coef_: shape (1, features) for two classes, else (classes, features).
        intercept_: shape (1,) or (classes,).
        classes_: the class labels.
        privacy_: `Guarantee` of everything that ``fit`` learnt.
        ledger_run_: the id of the fit's charge on its ledger; None without one.

    **Guarantee.** ``privacy_``, for every table: rows are clipped and gradients bounded record by
    record, whatever they hold; with ``persons``, what a person adds is a mean of bounded rows. It
    covers one ``fit``, and its notes say what all runs on the
    ledger cost together. Choosing settings by comparing fits (`GridSearchCV`) multiplies what is
    spent, as a `RepeatedFitWarning` says, and scores on private data are releases of their own.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPLogisticRegression
        >>> y = x[:, 0] > 0
        >>> model = DPLogisticRegression(epsilon=2.0, data_norm=2.0, classes=[False, True])
        >>> model = model.fit(x, y)
        >>> model.score(x, y) > 0.9, model.privacy_.epsilon <= 2.0
        (True, True)
    """

    classes: Sequence[Any] | None = None
    class_weight: Any = None  # a mapping; what else people give is refused with the fix

    def _learn(self, given: Given) -> None:
        with all_ranks() as ranks:
            x, classes = self._rows(given), self._stated(given)
            labels = one_label_a_row(given.y, rows=len(x))
            owners = owners_of(x, given.persons, self.rows_per_person)
            weights = weights_of_rows(given.weights, rows=len(x), most=self.weight_bound)
            x, labels, weights = own_part(self, x, labels, weights, owners, ranks)
            notes = (READ_OFF,) if classes is None else ()
            known = classes_of_all(labels, ranks) if classes is None else classes
            self.classes_, numbers = class_numbers(known, labels)
            binary = len(self.classes_) == 2
            model = LinearModel(
                "logistic" if binary else "softmax",
                features=x.shape[1],
                outputs=1 if binary else len(self.classes_),
                intercept=self.fit_intercept,
            )
            of_classes = public_weights(self.class_weight, self.classes_)
            solution = self._solve(
                model,
                x,
                numbers,
                notes,
                ranks,
                chunk=given.chunk,
                shares=None if of_classes is None else of_classes[numbers],
                weights=weights,
                owners=owners,
            )
        self.coef_, self.intercept_ = self._split(solution)

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Scores: shape (n,) for two classes, else (n, classes)."""
        check_is_fitted(self)
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of shape (n, classes)."""
        scores = self._scores(X)
        if len(self.classes_) == 2:
            scores = np.hstack([np.zeros_like(scores), scores])
        return softmax(scores)

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row, shape (n,)."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]


@dataclass(kw_only=True, eq=False, repr=False)
class DPLinearRegression(FitsNumbers, LinearFit):
    """Linear regression with squared or Huber loss and differential privacy.

    Args:
        target_bound: required; public bound on |y|, or ``(lowest, highest)`` of y, which is better
            where 0 is not in the middle. Targets are clipped to it. It must not be read off the
            data.
        loss: ``"squared"``, or ``"huber"``, which is linear beyond ``huber_delta``.
        huber_delta: in units of half the range of y, > 0; so a loose bound makes it loose, too. At
            the default few residuals are cut, and predictions are near the mean. Smaller ones
            (0.15) help where noise is large: few records, or a bound many times as wide as targets
            scatter; they draw predictions of skewed targets towards the median.
        solver: as for `DPLogisticRegression`, or ``"sufficient-statistics"`` (noisy sums of x x^T
            and x y, for a squared loss); ``"auto"`` takes these where data is plenty, else
            ``"momentum-gd"``. For a squared loss without ``clip_norm`` it first spends up to a
            tenth of the budget's mu^2 on where targets lie in their range, if there are records
            enough to tell, and learns in that part: three standard deviations about their mean.
            With many records 3 % more go to the mean residual, by which it moves the intercept.

    The other arguments, and the **Guarantee**, as for `DPLogisticRegression`. The loss is
    minimised for targets scaled to [-1, 1]: ``target_bound``, or half the range, is their unit.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPLinearRegression
        >>> y = x @ [1.0, 0.0, -1.0]
        >>> model = DPLinearRegression(epsilon=2.0, data_norm=2.0, target_bound=2.0).fit(x, y)
        >>> model.score(x[:100], y[:100]) > 0.8  # made-up data, so scores are free
        True
    """

    target_bound: TargetBound | None = None
    loss: Literal["squared", "huber"] = "squared"
    huber_delta: float = 0.5
    _allowed: TargetRange = field(init=False)  # of the chunks so far
    _part: TargetRange = field(init=False)  # of that, in which the weights were learnt

    def _learn(self, given: Given) -> None:
        with all_ranks() as ranks:
            x = self._rows(given)
            scaled, allowed = bounded_targets(given.y, self.target_bound, rows=len(x))
            if self.loss not in ("squared", "huber"):
                raise ValueError(f"loss must be 'squared' or 'huber', got {self.loss!r}.")
            if given.chunk and hasattr(self, "_chunks") and allowed != self._allowed:
                raise ValueError(
                    f"target_bound={allowed} must stay {self._allowed}, as in earlier chunks; or "
                    "call fit anew."
                )
            owners = owners_of(x, given.persons, self.rows_per_person)
            weights = weights_of_rows(given.weights, rows=len(x), most=self.weight_bound)
            x, scaled, weights = own_part(self, x, scaled, weights, owners, ranks)
            if allowed != getattr(self, "_allowed", None):
                self._part = WHOLE
            self._allowed = allowed
            model = LinearModel(
                self.loss, x.shape[1], intercept=self.fit_intercept, huber_delta=self.huber_delta
            )
            solution = self._solve(
                model, x, scaled, (), ranks, chunk=given.chunk, weights=weights, owners=owners
            )
        coefficients, intercept = self._split(solution)
        targets = allowed.part(self._part)
        self.coef_ = coefficients[0] * targets.half
        self.intercept_ = float(targets.unscaled(intercept[0]))

    def _solved(
        self,
        run: Run,
        data: tuple[Any, ...],
        budget: Budget,
        ledger: Ledger | None,
        ranks: Ranks,
        *,
        anew: bool,
        label: str,
    ) -> tuple[Tensor, Guarantee]:
        """By default in the part of the range that targets take up, found within the budget.

        Weights that are gone on from keep to the part they were learnt in, which is released.
        """
        if anew:
            self._part = WHOLE
        by_itself = self.solver == "auto" and self.loss == "squared" and self.clip_norm is None
        if (
            anew
            and by_itself
            and can_be_narrowed(
                price_of_round(budget.gdp), ranks.all_sum(len(data[1])), self.relation
            )
        ):
            weights, guarantee, self._part = solve_in_part(
                run,
                data,
                budget,
                intercept=self.fit_intercept,
                neighboring=self.relation,
                ledger=ledger,
                noise_seed=self.noise_seed,
                ranks=ranks,
                label=label,
            )
            return weights, guarantee
        if self._part != WHOLE:  # targets may be many: no copy without need
            data = (data[0], self._part.scaled(data[1]), *data[2:])
        return run(data=data, budget=budget, ledger=ledger, ranks=ranks)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predictions of shape (n,)."""
        return self._scores(X)[:, 0]
