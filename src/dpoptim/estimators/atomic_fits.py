"""Fits that are made whole or not at all, as every ``fit`` of this library is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from sklearn.base import BaseEstimator

from dpoptim.accounting.ledger_charge import charges_made
from dpoptim.estimators.other_fits import warn_of_other_fits

Fit = TypeVar("Fit", bound=Callable[..., Any])
COUNT = "_fit_count"  # of charges, which a fit that fails may have made


def whole_fit(fit: Fit) -> Fit:
    """Make a method that learns one that changes nothing where it fails, and then warns.

    **Guarantee.** What an estimator, and each step within, holds after a fit that was refused or
    interrupted is what its ``privacy_`` speaks of: nothing that the fit has read or released.
    """

    @wraps(fit)
    def fitted(learner: Any, *data: Any, **more: Any) -> Any:
        before = len(vars(learner)[COUNT].fits) if COUNT in vars(learner) else 0
        with as_before_where_it_fails(learner), charges_made() as made:
            found = fit(learner, *data, **more)
            # parts of a charge come after it, on ledgers of their own
            learner._note_charge(made[0] if made and learner.ledger is not None else None)
        learner._warn_of_repeats()  # of `CountsFits`
        warn_of_other_fits(learner, (*data, more.get("X"), more.get("y")), before)
        return found

    return cast(Fit, fitted)


@contextmanager
def as_before_where_it_fails(learner: BaseEstimator) -> Iterator[None]:
    """Give ``learner``, and estimators within, their attributes again where the ``with`` fails."""
    parts = [learner, *learner.get_params(deep=True).values()]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (vars(part), dict(vars(part))) for part in parts if isinstance(part, BaseEstimator)
    ]
    try:
        yield
    except BaseException:
        for attributes, held in before:
            count = {COUNT: attributes[COUNT]} if COUNT in attributes else {}
            attributes.clear()
            attributes.update(held | count)
        raise
