"""The binary tree mechanism (Dwork et al. 2010; Chan, Shi and Song 2011), and Honaker's better
estimate from it.

A node of height j holds the sum of 2^j steps, [i 2^j, (i + 1) 2^j), plus noise of its own. The
first t + 1 steps fall into as many nodes as t + 1 has ones in binary, and the sum of their noisy
values is the released prefix sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from dpoptim.noise.correlated.strategy import Floats, NoiseState, most_participations, rounded_up
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class BinaryTree:
    """Noise on the nodes of a binary tree. Remembers one vector for each bit of the step number:
    O(log T).

    Args:
        estimate: ``"plain"`` takes each node's own noisy value. ``"honaker"`` combines it with
            what the nodes below it say (Honaker 2015, the online estimate from below), with the
            weights of least variance: post-processing of the same nodes, so the guarantee is the
            same and the error is a fifth to a quarter smaller.
    """

    estimate: Literal["plain", "honaker"] = "plain"

    def __post_init__(self) -> None:
        if self.estimate not in ("plain", "honaker"):
            raise ValueError(f'estimate must be "plain" or "honaker", got {self.estimate!r}.')

    def sensitivity(
        self,
        steps: int,
        participations: int = 1,
        separation: int | None = None,
        *,
        regular: bool = False,
    ) -> float:
        """sqrt(number of heights) for one participation, exactly; for several, see
        `largest_squared_shift`.
        """
        k, b = most_participations(steps, participations, separation)
        squared = largest_squared_shift(steps, k, b, every_node=self.estimate == "honaker")
        return rounded_up(float(np.sqrt(squared)))

    def prefix_std(self, steps: int) -> Floats:
        variances = [self._variance(height) for height in range(steps.bit_length())]
        ones = (np.arange(1, steps + 1)[:, None] >> np.arange(len(variances))) & 1
        return np.sqrt(ones @ np.array(variances)) * self.sensitivity(steps)

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return TreeState(self, steps, sizes, stream)

    def _variance(self, height: int) -> float:
        """Of the estimate of a node's sum, for node noise of variance 1; also the weight of the
        node's own value.
        """
        return 1.0 if self.estimate == "plain" else 2.0**height / (2.0 ** (height + 1) - 1)


class TreeState(NoiseState):
    """Remembers the noise in the estimate of each closed node that the current prefix sum consists
    of, highest first.
    """

    def __init__(
        self, tree: BinaryTree, steps: int, sizes: Sequence[int], stream: KeyStream
    ) -> None:
        super().__init__(steps, sizes, stream)
        self._tree = tree

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        """The noise of the node that this step closes, less that of the nodes that it replaces."""
        # trailing ones of the step number
        merged = (~self.step & (self.step + 1)).bit_length() - 1
        estimate = self._draw(like)
        replaced = None
        for height in range(1, merged + 1):
            left = remembered.pop()
            replaced = left.clone() if replaced is None else replaced.add_(left)
            if self._tree.estimate == "honaker":
                weight = self._tree._variance(height)
                estimate = estimate.add_(left).mul_(1 - weight).add_(self._draw(like), alpha=weight)
        remembered.append(estimate)
        return estimate if replaced is None else estimate - replaced


def largest_squared_shift(
    steps: int, participations: int, separation: int, *, every_node: bool
) -> float:
    """The most that the squared counts of one record add up to, over the nodes whose noisy sums
    are released.

    Plain prefix sums consist of left nodes: a right one is part of its parent from the moment that
    it is closed, and its own noisy sum does not exist. Honaker's estimate uses those of both kinds
    (``every_node``).

    From the leaves upwards: how much c participations below a node can add at most, for every c,
    from its two halves. Any window of 2^j steps holds at most ceil(2^j / separation) of them.
    Exact for separation 1, where nothing else restricts them (tests compare with all patterns);
    else an upper bound, of which the truth was at least 91 % in squares of 25 or more.
    """

    def most(nodes: int) -> int:
        return min(participations, -(-nodes // separation))

    below = [np.zeros(most(1) + 1)]  # for each height: without the node itself
    for height in range(1, steps.bit_length()):
        half = below[-1]
        right = released(half) if every_node else half
        below.append(split_best(released(half), right, most(1 << height)))
    total, length = np.zeros(1), 0
    # the closed nodes that all steps consist of are left ones
    for height in reversed(range(steps.bit_length())):
        if steps >> height & 1:
            length += 1 << height
            total = split_best(total, released(below[height]), most(length))
    return float(total.max())


def released(below: Floats) -> Floats:
    """With the node's own noisy sum, which c participations shift by c."""
    return below + np.arange(len(below), dtype=np.float64) ** 2


def split_best(left: Floats, right: Floats, most: int) -> Floats:
    """The best way of dividing c participations between two halves, for c up to ``most``."""
    best = np.full(min(most, len(left) + len(right) - 2) + 1, -np.inf)
    for count, value in enumerate(left[: len(best)]):
        reach = min(len(right), len(best) - count)
        np.maximum(
            best[count : count + reach], value + right[:reach], out=best[count : count + reach]
        )
    return best
