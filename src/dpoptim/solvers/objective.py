"""An empirical risk: a loss, and the private records that it is averaged over."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.accounting.guarantee import neighboring_name, parse_neighboring
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.errors import PrivacyError
from dpoptim.solvers.problem import Problem, Terms


class Objective:
    """``F(w) = (1/n) sum_i f(w; z_i) + penalty(w)`` over a private data set; results are private.

    Args:
        problem: the loss, e.g. `LinearProblem` or `ModuleProblem`.
        data: arrays of equal length, records on the first axis (such as x and y): tensors, numpy
            arrays, memory maps, or what else has a length and slices. Tensors and arrays are
            prepared once: do not change them afterwards. The rest is streamed at every pass.
        neighboring: ``"zero-out"`` (a record may contribute nothing) or ``"replace-one"``; n is
            public under both.
        chunk: records taken at a time. It changes speed and memory only.
        ranks: the processes that hold the other records, each an objective of its own; ``data`` is
            this one's part, in which no record of another is.

    Raises:
        ValueError: arrays of unequal length or without records, another relation, or more records
            than the problem's capacity.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import LinearModel, LinearProblem, Objective
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> objective.n
        1000
    """

    def __init__(
        self,
        problem: Problem,
        data: Sequence[Any],
        *,
        neighboring: str = "zero-out",
        chunk: int = 8192,
        ranks: Ranks = ALONE,
    ) -> None:
        lengths = {len(part) for part in data}
        if len(lengths) != 1 or (ranks.size == 1 and 0 in lengths):
            raise ValueError(
                "data must be arrays of one length, at least 1, got lengths "
                f"{[len(part) for part in data]}."
            )
        self.neighboring = neighboring_name(parse_neighboring(neighboring))
        if self.neighboring == "add-or-remove-one":
            raise ValueError(
                "neighboring='add-or-remove-one' would make n private, but the solvers divide by "
                "it. Fix: neighboring='zero-out' or 'replace-one'."
            )
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk!r}.")
        self.problem, self.ranks = problem, ranks
        self._own = lengths.pop()
        ranks.arrive("Objective")
        self.n = ranks.all_sum(self._own)  # in all processes; public
        if self.n > problem.capacity:
            raise ValueError(
                f"the problem's capacity of {problem.capacity} records is below n={self.n}, so "
                f"rounding could exceed the bound. Fix: capacity={self.n}."
            )
        streamed = not all(held_in_memory(part) for part in data)
        self._data, self._chunk = tuple(data), chunk
        self._prepared = None if streamed else list(self._stream())

    @property
    def dimension(self) -> int:
        """d, the number of parameters."""
        return self.problem.dimension

    def clipped_sum(self, terms: Terms, bound: float) -> Tensor:
        """``sum_i clip(sum_j c_j grad f(w_j; z_i), bound)`` over own records, (d,). Private.

        **Guarantee.** Zeroing out a record changes it by at most ``bound``, replacing one by at
        most twice that.
        """
        total = torch.zeros(self.dimension, dtype=torch.float64, device="cpu")
        for batch in self._prepared or self._stream():
            total += self.problem.clipped_sum(batch, terms, bound)
        return total

    def risk(self, w: Tensor, *, data_is_public: bool) -> float:
        """F(w), unclipped. No privacy at all: for public and synthetic data.

        Raises:
            PrivacyError: without ``data_is_public=True``.
        """
        if not data_is_public:
            raise PrivacyError(
                "the risk of private data is private. Fix: look at it on public data, and say so."
            )
        losses = (self.problem.total_loss(batch, w) for batch in self._prepared or self._stream())
        everyone = self.ranks.all_gather(math.fsum(losses))
        return math.fsum(everyone) / self.n + self.problem.penalty(w)

    def _stream(self) -> Iterator[Any]:
        for start in range(0, self._own, self._chunk):
            yield self.problem.prepare(
                tuple(part[start : start + self._chunk] for part in self._data)
            )


def held_in_memory(part: Any) -> bool:
    """Whether it is a tensor or an array, and no view of a memory map."""
    if not isinstance(part, np.ndarray):
        return isinstance(part, Tensor)
    mapped = isinstance(part, np.memmap)
    return not mapped and (not isinstance(part.base, np.ndarray) or held_in_memory(part.base))
