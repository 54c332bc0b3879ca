"""How long a run is, in steps."""

from dpoptim.arguments import positive_number, whole_number
from dpoptim.sampling.sampler import Sampler

MOST_STEPS = 10_000_000


def number_of_steps(sampler: Sampler, epochs: float | None, steps: int | None) -> int:
    """Steps of the run: epochs rounded up to whole steps, so that what runs is accounted."""
    if (epochs is None) == (steps is None):
        raise ValueError("give either epochs or steps: one of them, and not both.")
    if steps is not None:
        whole = whole_number("steps", steps, least=1)
    else:
        whole = sampler.steps(positive_number("epochs", epochs))
    if whole > MOST_STEPS:
        given = f"epochs of {epochs:g}" if steps is None else f"steps of {steps:g}"
        raise ValueError(
            f"{given} make a run that is too long to account for; plan at most {MOST_STEPS} steps."
        )
    return whole
