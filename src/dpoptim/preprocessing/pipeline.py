"""A scikit-learn pipeline with one budget for everything that it learns from private records."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import dp_accounting
from sklearn import get_config
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.utils.metaestimators import available_if

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.gaussian import gdp_epsilon
from dpoptim.accounting.guarantee import Guarantee, neighbours_differ_by
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import public_number_of_records, relation_of, stated_delta
from dpoptim.arguments import positive_number
from dpoptim.data.input_arrays import NO_COLUMNS, refuse_queries
from dpoptim.data.sparse_rows import TWO_AXES, shape_of
from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.persons import owners_of, units_in
from dpoptim.estimators.repeats import CountsFits, Fit, label_of, uncounted
from dpoptim.estimators.shards import SAME_TABLE, agree_on_all, all_ranks
from dpoptim.gate import charged_together, event_ahead
from dpoptim.gate.one_process import alone
from dpoptim.opacus_words import KnowsOpacus
from dpoptim.preprocessing.broadcast import pack, unpack
from dpoptim.preprocessing.private_step import PrivateStep, only_tried
from dpoptim.preprocessing.steps_of_others import notes_on_others
from dpoptim.preprocessing.steps_within import (
    as_parts,
    charged_steps,
    is_part,
    own_notes,
    private_steps,
    seeded_notes,
    shares_as_given,
    steps_with,
    with_state,
)
from dpoptim.statistics import price_of

MOST_SHARE = 0.3  # of mu^2, for all preprocessing together
# for each charged step: what it learns is more precise where the budget is larger, however much of
# their public ranges columns take up
LEAST_SHARE = 0.1
LEFT = 1 - 1e-9  # so that rounding cannot end above the budget
MOST_LABEL = 160  # characters of names


class PrivatePipeline(KnowsOpacus, CountsFits, Pipeline):
    """Transformers and an estimator of `dpoptim.estimators` that share one budget and one ledger.

    Args:
        steps: as for scikit-learn's ``Pipeline``; `ColumnTransformer` and the like may hold the
            transformers. Steps of others that would learn from the records are refused; what is on
            trust stands in the notes. All are fitted in this process, whatever ``n_jobs`` says.
        epsilon, delta: the budget of everything that a fit learns. What the steps say of their own
            is not used.
        shares: of the budget's mu^2, by the name of a charged step (as in ``get_params``); None:
            what each needs for a precision of a hundredth of the columns' ranges, but at least
            0.1, and at most 0.3 for all; functions of public numbers.
        ledger: where everything is charged, as one run; None: nowhere.
        label: public text for the ledger's entry; None: the names of class and steps.
        memory: as for ``Pipeline``; None where a step is charged.
        verbose, transform_input: as for ``Pipeline``.

    Attributes:
        privacy_: `Guarantee` of everything that the last ``fit`` learnt; also of the last step.
        shares_: what each charged step was given.

    **Guarantee.** ``privacy_``. The releases of a fit have parameters fixed by public numbers
    before the first of them, so their events compose; charged steps are Gaussian, so their mu^2
    add up.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (2_000, 3))
        >>> from dpoptim.estimators import DPLogisticRegression
        >>> from dpoptim.preprocessing import DPStandardScaler, PrivatePipeline
        >>> steps = [
        ...     ("scale", DPStandardScaler(lower=-1, upper=1)),
        ...     ("model", DPLogisticRegression(classes=[False, True])),
        ... ]
        >>> pipeline = PrivatePipeline(steps, epsilon=2.0).fit(x, x[:, 0] > 0)
        >>> pipeline.privacy_.epsilon <= 2.0
        True
    """

    privacy_: Guarantee

    def __init__(
        self,
        steps: list[tuple[str, Any]],
        *,
        epsilon: float = 1.0,
        delta: float | Literal["auto"] = "auto",
        shares: Mapping[str, float] | None = None,
        ledger: Ledger | None = None,
        label: str | None = None,
        memory: Any = None,
        verbose: bool = False,
        transform_input: Any = None,
    ) -> None:
        super().__init__(steps, memory=memory, verbose=verbose, transform_input=transform_input)
        self.epsilon = epsilon
        self.delta = delta
        self.shares = shares
        self.ledger = ledger
        self.label = label

    def __getitem__(self, ind: Any) -> Any:
        """A step; or those of a slice, on the same budget and ledger if they are fitted again."""
        found = super().__getitem__(ind)
        if isinstance(ind, slice):
            found.set_params(epsilon=self.epsilon, delta=self.delta, ledger=self.ledger)
            found._fit_count = self._count
        return found

    @whole_fit
    def fit(self, X: Any, y: Any = None, *, persons: Any = None, **params: Any) -> Self:
        """Fit every step on its share of the budget.

        In several processes, which all have the whole table, the first one fits, and hands on to
        the others what it has learnt.

        Args:
            persons: the owner of each row, where the guarantee shall protect persons who have
                several; for the last step, the only one that may then learn from records.
            params: of steps' ``fit``, as in scikit-learn.

        Raises:
            ValueError: a last step without a budget, a step that would learn without one, steps
                under different neighbouring relations, bad shares, persons whom a step does not
                know, or what a step refuses, which copies of all are tried for where one is
                charged; before anything is spent.
            BudgetExceeded: the ledger does not admit all steps; nothing is charged or drawn.
            RankError: another process has failed, or does not agree.
        """
        if is_part(self):
            return super().fit(X, y, **params)
        with all_ranks() as ranks:
            agree_on_all(self, X, y, ranks)

            def here() -> bytes:
                with alone():
                    self._learn(X, y, persons, params)
                if ranks.size == 1:
                    return b""
                note = f"fitted in one of {ranks.size} processes, and handed on; {SAME_TABLE}"
                self.privacy_ = replace(self.privacy_, notes=(*self.privacy_.notes, note))
                self.steps[-1][1].privacy_ = self.privacy_
                return pack(self, ("privacy_", "shares_"))

            handed = ranks.from_first(here)
            if ranks.rank:
                unpack(self, handed)
        return self

    @available_if(lambda self: hasattr(self.steps[-1][1], "transform"))  # type: ignore[untyped-decorator]
    def fit_transform(self, X: Any, y: Any = None, **params: Any) -> Any:
        """``fit``, and what its steps make of X; of a pipeline whose last step transforms."""
        if is_part(self):
            return super().fit_transform(X, y, **params)
        return self.fit(X, y, **params).transform(X)

    def _learn(self, X: Any, y: Any, persons: Any, params: dict[str, Any]) -> None:
        last, charged, relation = self._steps_with_budgets()
        trusted = dict.fromkeys(notes_on_others(self.steps[:-1]))
        persons = self._persons_of_last(persons, params, charged)
        refuse_queries(X)  # dates are for the steps that use them
        owners = None if persons is None else owners_of(X, persons, last.rows_per_person)
        unit, units = units_in(X, owners)
        n = public_number_of_records(getattr(last, "n", None), units, relation)
        delta, said = stated_delta(self.delta, n, epsilon=self.epsilon)
        epsilon = positive_number("epsilon", self.epsilon)
        mu = price_of(epsilon, delta)
        self.shares_ = self._divide(charged, X, n, mu)
        epsilons = {
            name: gdp_epsilon(mu * math.sqrt(share), delta) for name, share in self.shares_.items()
        }
        differ = neighbours_differ_by(relation)
        before: list[Any] = [
            dp_accounting.GaussianDpEvent(differ / price_of(each, delta))
            for each in epsilons.values()
        ]
        rest = mu * math.sqrt(1 - math.fsum(self.shares_.values())) * LEFT
        if hasattr(last, "epsilon_after"):
            final = last.epsilon_after(before, n=n, epsilon=epsilon * LEFT, delta=delta)
        else:
            final = gdp_epsilon(rest, delta)
        with_budgets = partial(_budgets, delta=delta, n=n, relation=relation)
        epsilons[self.steps[-1][0]] = final
        # without these the last step refuses by itself, before anything is spent
        last_event = self._try(X, y, params, epsilons, with_budgets, relation) if before else None
        parts = [*before, last_event] if last_event is not None else before
        with self._ledger_of_fit(parts, relation, delta) as ledger:
            earlier = {entry.id for entry in ledger.entries()}
            budgets = with_budgets(steps_with(epsilons, self), ledger=ledger)
            with budgets, uncounted(), as_parts(self):
                super().fit(X, y, **params)
            events = [entry.event for entry in ledger.entries() if entry.id not in earlier]
            for step in private_steps(self):
                if step.ledger is ledger:  # a fitted clone, which would keep it
                    step.ledger = self.ledger
        event = dp_accounting.ComposedDpEvent(events)
        whole = compute_epsilon(event, delta, relation)
        notes = dict.fromkeys((*own_notes(last), *seeded_notes(self), *said, *trusted))
        whole = replace(whole, unit=unit.name, notes=(*notes,))
        self.privacy_ = self._counted(Fit(event, whole, n))
        last.privacy_, last._paid = self.privacy_, self._paid
        for step in self._fitted_parts():
            step._fit_id = self._fit_id

    def _fitted_parts(self) -> tuple[Any, ...]:
        return (self.steps[-1][1], *private_steps(self))

    def _note_charge(self, run: str | None) -> None:
        """Keep it in the steps, too, which are charged together."""
        super()._note_charge(run)
        for step in self._fitted_parts():
            step.ledger_run_ = run

    def _try(
        self,
        X: Any,
        y: Any,
        params: dict[str, Any],
        epsilons: Mapping[str, float],
        with_budgets: Callable[..., AbstractContextManager[None]],
        relation: str,
    ) -> Any:
        """Fit copies of all steps as far as the last one's charge: it says what it would refuse.

        Returns the event that it would reserve; None: none.
        """
        copy = clone(self)
        copy.steps[-1] = (self.steps[-1][0], with_state(self.steps[-1][1]))

        def fit(ledger: Ledger) -> None:
            budgets = with_budgets(steps_with(epsilons, copy), ledger=ledger)
            with budgets, as_parts(copy):
                Pipeline.fit(copy, X, y, **params)

        with warnings.catch_warnings(), only_tried(), uncounted():
            warnings.simplefilter("ignore")  # they come with the fit
            return event_ahead(fit, relation)

    def _ledger_of_fit(
        self, parts: list[Any], relation: str, delta: float
    ) -> AbstractContextManager[Ledger]:
        """The ledger of the steps: several are charged as one run, being fixed beforehand.

        Args:
            parts: their events; none: the last step is charged by itself.
        """
        if parts:
            named = ", ".join((type(self).__name__, *dict(self.steps)))[:MOST_LABEL]
            label = label_of(named if self.label is None else self.label, self.epsilon, delta)
            return charged_together(self.ledger, parts, neighboring=relation, label=label)
        return nullcontext(Ledger(neighboring=relation) if self.ledger is None else self.ledger)

    def _persons_of_last(
        self, persons: Any, params: dict[str, Any], charged: Mapping[str, PrivateStep]
    ) -> Any:
        """Who owns the rows, as given here or for the last step, which is told through params."""
        routed = get_config()["enable_metadata_routing"]  # by the name that a step asks for
        name = "persons" if routed else f"{self.steps[-1][0]}__persons"
        persons = params.pop(name, None) if persons is None else persons
        if persons is None:
            return None
        if charged:
            raise ValueError(
                f"persons: step {next(iter(charged))!r} learns from rows as if each were "
                "somebody else's. Fix: a step that learns nothing, such as DPMinMaxScaler with "
                "public bounds, or categories that are public."
            )
        params[name] = persons
        return persons

    def _steps_with_budgets(self) -> tuple[Any, dict[str, PrivateStep], str]:
        """The last step, those before it that pay, by name, and the relation of all."""
        last = self.steps[-1][1]
        settings = last.get_params(deep=False) if hasattr(last, "get_params") else ()
        if not {"epsilon", "delta", "ledger", "neighboring"} <= set(settings):
            raise ValueError(
                "the last step must be an estimator of dpoptim.estimators, whose budget the "
                f"pipeline sets, got {type(last).__name__ if settings else repr(last)}."
            )
        relation = relation_of(last.neighboring, self.ledger, last.relations)
        charged = charged_steps(self)
        for name, step in charged.items():
            if step.neighboring not in (None, relation):
                raise ValueError(
                    f"step {name!r} must have neighboring={relation!r}, as the last step has."
                )
        return last, charged, relation

    def _divide(
        self, charged: Mapping[str, PrivateStep], x: Any, n: int, mu: float
    ) -> dict[str, float]:
        """Shares of mu^2 by step."""
        if self.shares is not None:
            return shares_as_given(self.shares, charged)
        if not charged:
            return {}
        shape = shape_of(x)
        if len(shape) != 2:
            raise ValueError(
                f"{TWO_AXES} Of texts, whose columns a step makes: shares=, of each charged step."
            )
        if not (columns := shape[1]):
            raise ValueError(NO_COLUMNS)
        wanted = {
            name: max(LEAST_SHARE, (step.wanted_mu(columns, n) / mu) ** 2)
            for name, step in charged.items()
        }
        scale = min(1.0, MOST_SHARE / max(math.fsum(wanted.values()), 1e-300))
        return {name: share * scale for name, share in wanted.items()}


@contextmanager
def _budgets(
    steps: list[tuple[Any, float]], delta: float, ledger: Ledger, n: int, relation: str
) -> Iterator[None]:
    """The steps with these epsilons meanwhile; afterwards with their own settings again."""
    kept = [(step, step.get_params(deep=False)) for step, _ in steps]
    try:
        for step, epsilon in steps:
            public = (
                {"n": n}
                if relation == "add-or-remove-one" and "n" in step.get_params(deep=False)
                else {}
            )
            step.set_params(epsilon=epsilon, delta=delta, ledger=ledger, **public)
        yield
    finally:
        for step, own in kept:
            step.set_params(
                **{name: own[name] for name in ("epsilon", "delta", "ledger", "n") if name in own}
            )
