"""Sums of weighted gradients: in float64, whatever they were multiplied in."""

from collections.abc import Sequence

from torch import Tensor

from dpoptim.clipping import Directions


class Sums:
    """Sums in float64 of the same records, one for each way a clipping rule weighs them (k).

    The first term is written, not added: what the memory held before does not matter.

    Args:
        totals: float64, as many entries each; read them only after `settle`.
        directions: see `clipping.Directions`.
    """

    def __init__(self, totals: Sequence[Tensor], directions: Directions = ((1.0,),)) -> None:
        self.totals, self.directions = totals, directions
        self._empty = [True] * len(totals)

    def restart(self) -> None:
        self._empty = [True] * len(self.totals)

    def settle(self) -> Sequence[Tensor]:
        """The sums so far: zeros if there was no term."""
        for total, empty in zip(self.totals, self._empty, strict=True):
            if empty:
                total.zero_()
        self._empty = [False] * len(self.totals)
        return self.totals

    def add(self, terms: Tensor, direction: Sequence[float] | None = None) -> None:
        """Add a term to each: any float dtype, k times as many entries, the first sum's first.

        Args:
            direction: where given there is one term, which is added to every sum as many times.
        """
        each = terms.view(-1, *self.totals[0].shape)
        for j, total in enumerate(self.totals):
            term, times = (each[j], 1.0) if direction is None else (each[0], direction[j])
            if times == 0:
                continue
            if self._empty[j]:
                total.copy_(term)
                if times != 1:
                    total.mul_(times)  # afterwards, so that float64 rounds
            else:
                total.add_(term, alpha=times)
            self._empty[j] = False
