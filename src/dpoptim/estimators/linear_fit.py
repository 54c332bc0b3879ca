"""Base of the linear estimators: bounded rows in, weights and a guarantee out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import stated_delta
from dpoptim.arguments import bound, positive_number, real_number, whole_number
from dpoptim.data.sparse_rows import SparseRows, rows_at_once
from dpoptim.distributed.ranks import Ranks
from dpoptim.estimators.chunks import Chunks, over_chunks, refuse_change
from dpoptim.estimators.narrow_rows import dtype_of_rows
from dpoptim.estimators.persons import of_persons, per_person, units_in
from dpoptim.estimators.repeats import FROM_EARLIER, Fit, label_of
from dpoptim.estimators.settings import Delta, PrivateSettings
from dpoptim.estimators.shards import notes_of_ranks
from dpoptim.estimators.solving import SINGLE_PASS, is_cross_entropy, solve
from dpoptim.estimators.table import ClippedRows, clipped_to, public_norm, table
from dpoptim.estimators.weights import notes_of_weights, parts_of_data, unit_of_weights
from dpoptim.sampling.sampler import MOST_STEPS
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.training.batches.privacy_units import Persons

Run = Callable[..., tuple[torch.Tensor, Guarantee]]
# of the largest gradient that a row of norm data_norm can have: where records are clipped by
# default
CLIPPED_SHARE = 0.1
# the same of gradient descent with momentum, the default, for cross-entropy, where there is much
# noise: see `share_by_noise`, and below how much that is
MOMENTUM_SHARE = 0.3
LITTLE_NOISE = 1e-3
SQUARED_SHARE = 0.1  # of a squared loss
# of a classifier's weights, from benchmarks/choose_length.py: see `length_for`
LENGTH_SHARE, LENGTH_POWER = 0.35, 0.3


@dataclass(kw_only=True, eq=False, repr=False)
class LinearFit(PrivateSettings):
    """The base of the linear estimators, which name loss and classes."""

    epsilon: float = field(default=1.0, kw_only=False)
    delta: Delta = field(default="auto", kw_only=False)
    data_norm: float | None = None
    l2: float = 0.0
    fit_intercept: bool = True
    solver: str = "auto"
    steps: int | None = None
    step_size: float | None = None
    clip_norm: float | None = None
    solver_options: Mapping[str, Any] | None = None
    warm_start: bool = False
    sharded: bool = False
    rows_per_person: int = 16
    weight_bound: float | None = None
    relations: ClassVar[tuple[str, ...]] = ("zero-out", "replace-one")  # n is public

    def _stated_steps(self) -> int | None:
        if self.steps is None:
            return None
        return whole_number("steps", self.steps, least=1, most=MOST_STEPS)

    def _length(self, start: torch.Tensor | None, strength: float) -> float:
        """The factor of a classifier's weights; 1 where a setting decides how long they are."""
        settings = (self.steps, self.step_size, self.clip_norm, self.solver_options or None)
        chosen = start is not None or self.l2 != 0 or settings != (None,) * 4
        return 1.0 if chosen else length_for(strength)

    def _start(
        self, model: LinearModel, earlier: Chunks | None
    ) -> tuple[torch.Tensor | None, tuple[str, ...]]:
        """Weights to go on from, if any, and what the guarantee has to say of them."""
        if earlier is not None:
            return torch.from_numpy(earlier.weights.ravel()), ()
        before = getattr(self, "_weights", None) if self.warm_start else None
        if before is None or before.shape != (model.outputs, model.columns):
            return None, ()
        return torch.from_numpy(before.ravel()), (FROM_EARLIER,)

    def _solve(
        self,
        model: LinearModel,
        x: Any,
        y: NDArray[Any],
        notes: tuple[str, ...],
        ranks: Ranks,
        *,
        chunk: bool,
        shares: NDArray[np.float64] | None = None,
        weights: NDArray[np.float64] | None = None,
        owners: Persons | None = None,
    ) -> NDArray[np.float64]:
        """Weights of shape (outputs, columns), the same on all ranks; sets ``privacy_``.

        A chunk goes on from the chunks before it.

        Args:
            x, y: this rank's rows; the whole table, without shards, where persons own them.
            shares: of the rows, in [0, 1]: factors of their clipped gradients.
            weights: of the rows: factors of their gradients before these are clipped.
            owners: of the rows.
        """
        ranks.arrive("fit")
        earlier: Chunks | None = getattr(self, "_chunks", None) if chunk else None
        if earlier is not None:
            refuse_change(self.privacy_, self.relation, by_person=owners is not None)
        if owners is not None:
            x, y, shares, weights = of_persons(
                owners,
                (x, y, shares, weights),
                ranks,
                sharded=self.sharded,
                noise_seed=self.noise_seed,
                in_order=self.solver in SINGLE_PASS,
                neighboring=self.relation,
            )
        n, features, (unit, _) = ranks.all_sum(len(x)), x.shape[-1], units_in(x, owners)
        delta, said = stated_delta(self.delta, n, epsilon=self.epsilon)
        radius = float(np.hypot(public_norm(self.data_norm, features), float(self.fit_intercept)))
        largest = model.lipschitz(radius)
        budget = Budget(delta=delta, epsilon=real_number("epsilon", self.epsilon))
        by_momentum = self.solver in ("auto", "momentum-gd") and is_cross_entropy(model)
        share = share_by_noise(n, model.dimension, budget.gdp) if by_momentum else CLIPPED_SHARE
        default = share * largest if np.isfinite(largest) else SQUARED_SHARE * radius
        clip_norm = default if self.clip_norm is None else bound("clip_norm", self.clip_norm)
        start, added = self._start(model, earlier)
        said = (*said, *added, *notes_of_weights(weights))
        norm = public_norm(self.data_norm, features)
        data = parts_of_data(x, y, shares, weights)
        unit_of_rows = unit_of_weights(data, self.weight_bound)
        kept = dtype_of_rows(self.solver, model, n / unit_of_rows, budget, norm=norm)
        data = (ClippedRows(x, norm, kept).at_hand(), *data[1:])
        label = label_of(self._named, self.epsilon, delta)
        run = partial(
            solve,
            self.solver,
            model,
            label=label,
            radius=radius,
            clip_norm=clip_norm,
            weight_bound=self.weight_bound,
            l2=real_number("l2", self.l2),
            steps=self._stated_steps(),
            step_size=(
                None if self.step_size is None else positive_number("step_size", self.step_size)
            ),
            options=self.solver_options,
            start=start,
            neighboring=self.relation,
            noise_seed=self.noise_seed,
        )
        ledger = None if self.ledger is None else self.ledger.of_units(unit.name)
        solution, guarantee = self._solved(
            run, data, budget, ledger, ranks, anew=start is None, label=label
        )
        if by_momentum:
            solution = solution * self._length(start, signal(n, model.dimension, budget.gdp))
        # another processor may have rounded the last step otherwise
        solution, guarantee = ranks.from_first(lambda: (solution, guarantee))
        if self.data_norm is None:
            said = (*said, clipped_to(features))
        shared = notes_of_ranks(ranks, owners, sharded=self.sharded)
        guarantee = per_person(guarantee, owners)
        guarantee = replace(guarantee, notes=(*guarantee.notes, *notes, *said, *shared))
        self._weights: NDArray[np.float64] = (
            solution.numpy().reshape(model.outputs, model.columns).copy()
        )
        if earlier is None:
            self._chunks = Chunks(self._weights, n)
        else:
            self._chunks = earlier.followed_by(self._weights, n)
            guarantee = over_chunks(self.privacy_, guarantee)
        self._weights = self._chunks.weights
        fit = Fit(budget.event(self.relation), guarantee, n, whole=earlier is None)
        self.privacy_ = ranks.from_first(lambda: self._counted(fit))
        return self._weights

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
    ) -> tuple[torch.Tensor, Guarantee]:
        """The weights that a solver finds, and what they cost.

        Args:
            run: `solve` with all settings but data and budget, ledger and ranks.
            anew: whether it starts from public weights.
            label: public text for the ledger's entry, which ``run`` has, too.
        """
        return run(data=data, budget=budget, ledger=ledger, ranks=ranks)

    def _split(
        self, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Coefficients (outputs, features) and intercepts (outputs,)."""
        if self.fit_intercept:
            return weights[:, :-1].copy(), weights[:, -1].copy()
        return weights.copy(), np.zeros(len(weights))

    def _scores(self, x: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        x = table(x, reset=False, estimator=self)
        rows: Any = ClippedRows(x, public_norm(self.data_norm, self.n_features_in_))
        if isinstance(x, SparseRows):
            rows = rows.at_hand()
        coefficients = np.atleast_2d(self.coef_).T
        step = rows_at_once(self.n_features_in_)
        scores = [rows[start : start + step] @ coefficients for start in range(0, len(rows), step)]
        return np.concatenate(scores) + self.intercept_


def share_by_noise(n: int, parameters: int, mu: float) -> float:
    """The share of the longest gradient at which records are clipped, from public numbers.

    Records that a model is wrong about are clipped first, so that less makes probabilities too
    sure, however many records there are; more is noise, from ``sqrt(parameters) / (mu n)`` of it.
    """
    noise = 1 / signal(max(n, 1), parameters, mu)
    return min(1.0, MOMENTUM_SHARE * max(1.0, (LITTLE_NOISE / noise) ** (1 / 3)))


def signal(n: int, parameters: int, mu: float) -> float:
    """How far all records together can pull, over the length of the noise. Public."""
    return mu * n / math.sqrt(parameters)


def length_for(strength: float) -> float:
    """The factor by which a classifier's weights are shortened, from public numbers.

    Noise makes them longer, and clipping surer, than the records are worth; what is predicted stays
    the same. A fit that goes on from weights is not shortened again.

    Args:
        strength: see `signal`.
    """
    return min(1.0, LENGTH_SHARE * (strength / 50) ** LENGTH_POWER)
