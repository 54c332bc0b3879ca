"""Small networks, private, as in scikit-learn: DP-SGD on Poisson batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.accounting.calibration import calibrate_event
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.estimators.fitting import FitsClasses, FitsNumbers, Given, softmax
from dpoptim.estimators.narrowed_fit import NarrowedFit
from dpoptim.estimators.network_fit import NetworkFit, Run, linear_layers
from dpoptim.estimators.repeats import label_of
from dpoptim.estimators.table import (
    bounded_targets,
    public_classes,
    public_norm,
    public_weights,
)
from dpoptim.estimators.target_spread import WHOLE
from dpoptim.methods import DiceSGD
from dpoptim.optimizers import OptimizerSettings
from dpoptim.plan import Plan
from dpoptim.target_range import TargetBound, TargetRange
from dpoptim.training.batches.privacy_units import Persons

STABLE = 1.5  # over (1 + momentum) / curvature, which is 2 where a squared loss begins to diverge
REGRESSION_CLIP = 0.3  # of a squared error; from benchmarks/choose_defaults.py
REGRESSION_FEEDBACK_CLIP = 0.6  # of DiceSGD, which undoes clipping; from there, too


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDClassifier(FitsClasses, NetworkFit):
    """A feed-forward network trained with cross-entropy, by DP-SGD or another method.

    Args:
        epsilon: the budget, > 0. All of it is spent by one ``fit``.
        delta: in (1e-14, 1), or ``"auto"``: at most 1e-5 and 1/(10 n), n being public under
            the neighbouring relations here; said in ``privacy_``.
        hidden_layer_sizes: widths of the hidden layers; a number is one.
        activation: ``"tanh"`` (bounded, which suits clipped gradients), ``"relu"`` or ``"gelu"``.
        data_norm: public bound on the Euclidean norm of a row, to which longer rows are scaled
            down; None: the square root of the number of features. It must not be read off the
            data.
        classes: all classes, as public knowledge. None: read off y, and said so in ``privacy_``.
        class_weight: public factors of the classes' losses, relative to the largest, such as those
            of `DPClassCounts.class_weight`; a class that is not named has 1. Gradients are clipped
            after weighting, so the guarantee does not depend on them. "balanced" would be read off
            the labels, and is refused.
        batch_size: expected batch. None: a fifteenth of the rows, at least 512.
        epochs: expected passes over the rows.
        optimizer: what moves the network by the released gradients, at no cost: ``"sgd"``,
            ``"adam"``, or ``"adam_bc"`` (`dpoptim.optim.AdamBC`, told the noise).
        learning_rate: of the optimizer. None: by the heuristic of `dpoptim plan`, from public
            numbers; SGD's follows the clip norm that a `PrivateQuantile` finds.
        momentum: of SGD; None: 0.9.
        betas: of Adam and AdamBC; None: (0.9, 0.999).
        clip_norm: bound on each record's gradient. None: from public numbers, 1 to 6, more where
            there is less noise, since clipping makes probabilities too sure; 1.2 for
            ``"dice-sgd"``, which undoes clipping and pays for it by its noise.
        iterate: what the network ends with: ``"average"``, the mean of the last half of the
            iterates; ``"last"``; or ``"random"``, one that coins choose among those that steps
            left.
        projection: radius of a ball around the start, to whose nearest point each step is moved;
            None: no ball.
        method: how it is trained, by its name in ``dpoptim methods``: ``"dp-sgd"``,
            ``"dp-ftrl"``, ``"dice-sgd"``, ``"value-sgd"``, or one that was registered.
        method_options: further settings of the method, such as ``{"momentum": 0.9}`` of
            ``"dp-ftrl"``; public. A ``clip_norm`` among them, such as a `PrivateQuantile`,
            takes the place of the argument.
        neighboring: ``"zero-out"`` (a record contributes nothing; the number of rows is public) or
            ``"add-or-remove-one"``, which hides how many rows there are and needs ``n``. None: as
            the ledger counts; else zero-out.
        n: a public estimate of the number of rows, from which batches, steps and noise are
            computed.
        warm_start: start from the network of the last fit, whose guarantee then adds up with this
            one's.
        random_state: of the initial weights; has nothing to do with the noise.
        ledger: where fits are charged, so that several cannot exceed a budget; None: nowhere.
        label: public text for the ledger's entry; None: the class's name.
        noise_seed: repeatable noise, for tests: the guarantee says that it is not for release.
        rows_per_person: where ``fit`` is told ``persons``, at most so many rows of each take part
            in a step, chosen by coins; their mean gradient is clipped once.

    Attributes:
        network_: the trained ``nn.Sequential``; in: rows clipped to ``data_norm``, out: scores.
        classes_: the class labels.
        optimizer_, learning_rate_: by which it was trained, as in ``"SGD, momentum 0.9"``.
        privacy_: `Guarantee` of everything that ``fit`` learnt.
        ledger_run_: the id of the fit's charge on its ledger; None without one.

    **Guarantee.** ``privacy_``, for every table. It covers one ``fit``, and its notes say what all
    runs on the ledger cost together. Choosing settings by comparing fits
    (`GridSearchCV`) multiplies what is spent, as a `RepeatedFitWarning` says, and scores on private
    data are releases of their own.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPSGDClassifier
        >>> y = x[:, 0] > 0
        >>> model = DPSGDClassifier(epsilon=4.0, classes=[False, True], epochs=5)
        >>> model.fit(x, y).privacy_.epsilon <= 4.0
        True
    """

    classes: Sequence[Any] | None = None
    class_weight: Any = None  # a mapping; what else people give is refused with the fix

    def _learn(self, given: Given) -> None:
        x = self._rows(given)
        self.classes_, numbers, notes = public_classes(self._stated(given), given.y, rows=len(x))
        weights = public_weights(self.class_weight, self.classes_)
        loss = nn.CrossEntropyLoss(
            weight=None if weights is None else torch.from_numpy(weights).float(), reduction="none"
        )
        targets = torch.from_numpy(numbers)
        self._train(x, targets, len(self.classes_), loss, notes, given)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of shape (n, classes)."""
        return softmax(self._outputs(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row, shape (n,)."""
        likeliest = self._outputs(X).argmax(1)
        return self.classes_[likeliest]


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGDRegressor(FitsNumbers, NetworkFit):
    """A feed-forward network trained with squared error, by DP-SGD or another method.

    Args:
        target_bound: required; public bound on |y|, or ``(lowest, highest)`` of y, which is better
            where 0 is not in the middle. Targets are clipped to it. It must not be read off the
            data. The error is measured in units of half the range.
        clip_norm: bound on each record's gradient. None: 0.3, and up to a tenth of the budget's
            mu^2 is first spent on where targets lie in their range, if there are records enough to
            tell: the network learns in that part, three standard deviations about their mean. Any
            number, or one among ``method_options``: the whole range.

    The other arguments, and the **Guarantee**, as for `DPSGDClassifier`.

    The first predictions are all the middle of the range, and without a ``learning_rate`` steps are
    short where there are few: so few epochs end near the mean's prediction rather than beyond it,
    unless the mean is several times as far from the middle as the targets scatter.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPSGDRegressor
        >>> model = DPSGDRegressor(epsilon=4.0, target_bound=1.0, epochs=5, hidden_layer_sizes=(8,))
        >>> model.fit(x, x[:, 0]).predict(x).shape
        (2000,)
    """

    _rate = 0.25
    # Weights move a unit at a time in so many steps. Longer ones swing about the minimum of a
    # squared loss, which only the average over many steps hides.
    _steps_to_swing = 25

    target_bound: TargetBound | None = None
    _allowed: TargetRange = field(init=False)  # of the chunks so far
    _part: TargetRange = field(init=False)  # of that, in which the network has learnt

    def _learn(self, given: Given) -> None:
        x = self._rows(given)
        targets, allowed = bounded_targets(given.y, self.target_bound, rows=len(x))
        if given.chunk and hasattr(self, "_allowed") and allowed != self._allowed:
            raise ValueError(
                f"target_bound={allowed} must stay {self._allowed}, the unit of earlier chunks; or "
                "call fit anew."
            )
        if allowed != getattr(self, "_allowed", None):
            self._part = WHOLE
        self._allowed = allowed
        self._train(x, torch.from_numpy(targets), 1, squared_errors, (), given)

    def _plan_of_fit(
        self, n: int, delta: float, epsilon: float, parameters: int, *, anew: bool
    ) -> Plan:
        plan = super()._plan_of_fit(n, delta, epsilon, parameters, anew=anew)
        if self._narrowed(plan, anew=anew) is None:
            return plan
        noise = calibrate_event(
            lambda noise: self._whole_event(replace(plan, noise_multiplier=noise)),
            epsilon=epsilon,
            delta=delta,
            neighboring=self.relation,
            start=plan.noise_multiplier,
        )
        return replace(plan, noise_multiplier=noise)

    def _event(self, plan: Plan) -> DpEvent:
        goes_on = self.warm_start and hasattr(self, "network_")
        return self._whole_event(plan) if self._by_itself and not goes_on else plan.event

    def _whole_event(self, plan: Plan) -> DpEvent:
        return NarrowedFit(plan, self.noise_seed, self._named).event

    @property
    def _by_itself(self) -> bool:
        """Whether no clip norm was chosen, for which the unit of targets would matter."""
        return self.clip_norm is None and "clip_norm" not in (self.method_options or {})

    def _narrowed(self, plan: Plan, *, anew: bool) -> NarrowedFit | None:
        """The fit, if it is to find out where targets lie; None: in the range it is given."""
        if not (anew and self._by_itself and plan.guarantee.status == "proven"):
            return None
        label = label_of(self._named, self.epsilon, plan.delta)
        fit = NarrowedFit(plan, self.noise_seed, label)
        return fit if fit.narrows else None

    def _trained(
        self, run: Run, plan: Plan, targets: Tensor, owners: Persons | None, *, anew: bool
    ) -> tuple[DpEvent, Guarantee]:
        """In the part of the range that targets take up; from other weights, in theirs."""
        y = targets.numpy()

        def train(part: TargetRange, ledger: Ledger | None) -> Guarantee:
            return run(torch.from_numpy(part.scaled(y).astype(np.float32))[:, None], ledger)

        if anew:
            self._part = WHOLE
        fit = self._narrowed(plan, anew=anew)
        if fit is None:
            return plan.event, train(self._part, self.ledger)
        guarantee, self._part = fit.run(train, y, owners, self.ledger)
        return fit.event, guarantee

    def _default_clip(self, n: int, parameters: int, mu: float) -> float:
        return REGRESSION_FEEDBACK_CLIP if self.method == DiceSGD.name else REGRESSION_CLIP

    def _learning_rate(self, plan: Plan, parameters: int, by: OptimizerSettings) -> float:
        rate = super()._learning_rate(plan, parameters, by)
        clip_norm = self._chosen_for(plan, by)
        longest = max(1.0, plan.steps / self._steps_to_swing)
        if clip_norm is None:
            return rate
        rate = min(rate, longest * (1 - by.momentum) / clip_norm)
        if self.method == DiceSGD.name:
            # What clipping takes off comes back, so that it does not keep long steps from diverging
            curvature = 2 * (public_norm(self.data_norm, self.n_features_in_) ** 2 + 1)
            rate = min(rate, STABLE * (1 + by.momentum) / curvature)
        return rate

    def _new(self, features: int, outputs: int) -> nn.Sequential:
        """A network that predicts 0: those of random weights are further off than the mean."""
        network = super()._new(features, outputs)
        last = linear_layers(network)[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return network

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predictions of shape (n,)."""
        outputs = self._outputs(X)[:, 0]
        return self._allowed.part(self._part).unscaled(outputs)


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """One a row: (rows, 1), (rows, 1) -> (rows,)."""
    return (outputs - targets).square().flatten(1).sum(1)
