"""How records are kept apart, in words: for the basis of a guarantee, and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials.isolation_fallback import Failure

if TYPE_CHECKING:
    from dpoptim.training.trials.isolation_trials import Trials
    from dpoptim.training.trials.made_up_records import Sample


ALONE = "records cannot be mixed: every microbatch has one record"
WHOLE = (
    "records cannot be mixed in the model: its forward pass is vectorised, with a row of "
    "parameters for each"
)
WAYS_IN_WORDS = {
    "alone": "records pass alone, one in each microbatch",
    "vmap": "the whole model is vectorised, with a row of parameters for each record",
    "rules": "{} are vectorised, with a row of parameters for each record",
}
PARTS = "in {} records cannot be mixed: vectorised, with a row of parameters for each"


def first_sentence(message: str) -> str:
    return message.split(". Fix: ", maxsplit=1)[0].rstrip(".")


def basis_of(isolation: Isolation, sample: Sample | None) -> tuple[Assumption, ...]:
    """Assumptions of a way that passed its trial, by the sample it was tried on."""
    whole = sample is not None and sample.whole
    inputs = "random inputs of 0 and 1, which alone it took," if whole else "random inputs,"
    passed = trusted(
        f"the model treats records independently (it did on {inputs} against batches of one)",
        of_program=True,
    )
    if isolation.alone:
        return (enforced(ALONE),)
    if isolation.enforced:
        return (enforced(WHOLE),)
    if isolation.by_vmap:
        return (enforced(PARTS.format(some(isolation.by_vmap))), passed)
    return (passed,)


def not_probed(reason: str) -> Assumption:
    return trusted(
        "the model treats records independently, and every layer has them on its first axis (not "
        f"tested on random inputs: {reason}; see dpoptim.check)",
    )


def forgets(reason: str) -> Assumption:
    return trusted(
        "the model keeps nothing from one record's forward pass to the next one's (not tested on "
        f"random inputs: {reason})",
    )


def some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def message_of(trials: Trials, isolation: Isolation, failure: Failure | None) -> str:
    """Warning about a way that is slower than rules; empty if there is nothing to tell."""
    if failure is None or (isolation.tier == "rules" and not isolation.by_vmap):
        return ""
    what = WAYS_IN_WORDS[isolation.tier].format(some(isolation.by_vmap))
    return (
        f"{what}, because with rules for layers {failure.reason}. On {trials.sample.rows} made-up "
        f"records a pass takes about {trials.factor(isolation):.2g} times as long as an ordinary "
        f"one. Say isolation={isolation.tier!r} to choose for yourself."
    )
