"""Which figures of a training loop may be shown: those that no private record took part in.

Losses and scores that a loop computes on the way are exact functions of private records. So what
is logged in training is what is known to be public; a list of what is known to be private would
miss whatever the next trainer thinks of.
"""

from collections.abc import Collection

SCORES = ("eval_", "test_", "predict_")  # how names of scores on public records begin
PUBLIC = (
    "epoch",
    "epsilon_reserved",
    "learning_rate",
    "step",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def names_of_figures(names: Collection[str]) -> frozenset[str]:
    """Names that the user vouches for, checked.

    Raises:
        TypeError: one string instead of several.
    """
    if isinstance(names, str):
        raise TypeError(
            f"public_figures takes several names, got one string. Fix: public_figures=[{names!r}]."
        )
    return frozenset(names)


def is_public(name: str, vouched: Collection[str]) -> bool:
    """Whether a figure of this name is of public numbers or records, or vouched for."""
    return name in PUBLIC or name in vouched or name.startswith(SCORES)
