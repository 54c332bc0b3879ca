"""Checks that all is as it was where a run that was left is entered again."""

from collections.abc import Callable, Sequence

import torch

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan
from dpoptim.training.refusals import (
    refuse_changed_parameters,
    refuse_engine,
    refuse_model,
    refuse_optimizers,
)
from dpoptim.training.trials.isolation import Chosen


def refuse_another_program(
    plan: Plan,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    same: bool,
    choose: Callable[[], Chosen],
) -> None:
    """Refuse to go on with another model or optimizers, as far as `attach` looks at them.

    Args:
        same: whether their names and shapes are.
        choose: finds out, on made-up records, how the model's records are kept apart now.

    Raises:
        PrivacyError: naming what is different.
    """
    refuse_model(engine.model)
    refuse_optimizers(optimizers)
    refuse_changed_parameters(engine)  # first: what trains now would be called foreign
    refuse_engine(plan, engine, optimizers)
    if not same:
        raise PrivacyError(
            "the model or the optimizers are not those that were left. Fix: attach them as a new "
            "run, which is a charge of its own."
        )
    if choose().isolation != engine.isolation:
        raise PrivacyError(
            "the model was changed after it was left: its records have to be kept apart in another "
            "way. Fix: undo the change, or attach it as a new run."
        )


def refuse_several_processes(ranks: Ranks) -> None:
    """Ranks that have left cannot agree on anything any more."""
    if ranks.size > 1:
        raise PrivacyError(
            "a run of several processes that was left cannot be saved, nor entered again. Fix: "
            "private.save(path) before it is left, and dpoptim.attach(..., resume=path) in all of "
            "them."
        )


def say_how_to_go_on(error: BaseException, done: int, steps: int) -> None:
    """Note on an error that ends a `with` that its run can go on; attaching anew would be charged.

    Args:
        done: so many steps are, of ``steps``.
    """
    if 0 < done < steps:
        error.add_note(
            f"dpoptim: {done} of {steps} steps are done, and the whole run is charged; attaching "
            "anew charges another. In this process `with private:` goes on with this one."
        )
