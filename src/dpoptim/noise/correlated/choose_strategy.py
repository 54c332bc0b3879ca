"""The strategy of least error within memory, for a run's length and pattern of participations."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpoptim.arguments import whole_number
from dpoptim.noise.correlated.banded import BandedToeplitz
from dpoptim.noise.correlated.buffered_toeplitz import BufferedToeplitz
from dpoptim.noise.correlated.fitting import LONGEST_SCALED
from dpoptim.noise.correlated.redrawn import RedrawnToeplitz
from dpoptim.noise.correlated.strategy import Strategy
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Workload

BUFFERS = 128


@dataclass(frozen=True)
class BestStrategy:
    """Which strategy to take is left to the run's numbers.

    Args:
        buffers: the most vectors, as long as the model, that noise may be remembered in; 0: none,
            and it is drawn again (`RedrawnToeplitz`).
        workload: of the optimizer whose iterates are to carry little noise.
    """

    buffers: int = BUFFERS
    workload: Workload = PREFIX_SUMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", whole_number("buffers", self.buffers, least=0))

    def made_for(self, steps: int, participations: int, separation: int) -> Strategy:
        """Return the strategy of least mean squared error of the iterates."""
        return best_strategy(steps, participations, separation, self.buffers, self.workload)


@lru_cache(maxsize=64)
def best_strategy(
    steps: int, participations: int, separation: int, buffers: int, workload: Workload
) -> Strategy:
    once = participations == 1 or separation >= steps
    if buffers == 0:
        return RedrawnToeplitz(separation=None if once else separation, workload=workload)
    span = steps if once else separation
    banded = BandedToeplitz(min(span, buffers + 1), None if once else separation, workload)
    if banded.bands == span:
        return banded  # nothing that fits is better
    candidates: list[BandedToeplitz | BufferedToeplitz] = [banded]
    scaled = steps <= LONGEST_SCALED
    apart = separation if scaled and not once else None
    candidates += [
        BufferedToeplitz(count, scaled, apart, workload) for count in (2, 3, 4) if count <= buffers
    ]
    if scaled and once and len(candidates) > 1:
        del candidates[0]  # its fit takes long, and few bands do not reach as far
    return min(
        candidates, key=lambda strategy: mean_error(strategy, steps, participations, separation)
    )


def mean_error(strategy: Strategy, steps: int, participations: int, separation: int) -> float:
    """Root mean squared error of iterates at 1-GDP, records in every ``separation``-th step."""
    once = strategy.prefix_std(steps)  # at the sensitivity of one participation
    several = strategy.sensitivity(
        steps, participations, separation, regular=True
    ) / strategy.sensitivity(steps)
    return float(np.sqrt(np.mean(once**2)) * several)
