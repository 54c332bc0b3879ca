"""Keep the points that a run reaches in a ball, and one of them by chance."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError
from dpoptim.noise.stream import KeyStream


class Iterates:
    """Projection of each point onto a ball around the start, and the one that chance has chosen.

    Das et al. 2023, Algorithm 1: its line 5 projects, its line 7 returns ``w_t`` for t uniform on
    0, ..., T - 1, the points that steps were taken from.

    Args:
        parameters: that are trained, by name, where they start.
        radius: of the ball, for all of them as one vector; None: no ball.
        coins: which all ranks have in common; None: none is kept.
        ranks: the processes that train together; they move by what rank 0 finds.

    **Guarantee.** Post-processing: the start is public, points are made of released gradients, and
    coins know no record. So nothing is charged, and the guarantee of the run is that of the
    projected points and of the one that was kept.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        radius: float | None,
        coins: KeyStream | None,
        ranks: Ranks,
    ) -> None:
        self._parameters, self._ranks = dict(parameters), ranks
        self._radius, self._coins = radius, coins
        self._start = {} if radius is None else self._copies()
        self._kept: dict[str, Tensor] = {}
        self._left = 0  # points that a step was taken from
        self._swapped = False

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def leave(self) -> None:
        """A step is about to be taken from where the parameters are.

        The k-th such point takes the place of the one that is kept with probability 1 / k, so that
        each of the k is there with the same.
        """
        if self._coins is None:
            return
        self._left += 1
        if len(self._coins.coins(1, 1 / self._left)) > 0:
            self._kept = self._copies()

    @torch.no_grad()
    def project(self) -> None:
        """Move the parameters to the nearest point of the ball."""
        if self._radius is None:
            return
        moves = {name: p.double() - self._start[name] for name, p in self._parameters.items()}
        distance = math.hypot(*(length(move) for move in moves.values()))
        distance = self._ranks.from_first(lambda: distance)
        if distance > self._radius:
            for name, p in self._parameters.items():
                p.copy_(self._start[name] + moves[name] * (self._radius / distance))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters with the point that is kept; a second call undoes it.

        Raises:
            PrivacyError: none is kept, or no step was taken.
        """
        if self._coins is None:
            raise PrivacyError(
                "no iterate was chosen by chance. Fix: attach(..., random_iterate=True)."
            )
        if not self._kept:
            raise PrivacyError("there is no iterate to choose before the first step.")
        for name, p in self._parameters.items():
            current = p.detach().clone()
            p.copy_(self._kept[name])
            self._kept[name] = current
        self._swapped = not self._swapped

    def refuse_swapped(self) -> None:
        """Refuse to go on from the point that was kept."""
        if self._swapped:
            raise PrivacyError(
                "the model has the random iterate, from which training does not go on. Fix: "
                "private.swap_random_iterate() again; to keep this point, save "
                "model.state_dict() while it is there (a Trainer's save_model, or "
                "save_checkpoint(path, weights_only=True))."
            )

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: released numbers."""
        return {"start": self._start, "kept": self._kept, "left": self._left}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._left = int(state["left"])
        self._start, self._kept = (
            {name: saved.to(self._parameters[name].device) for name, saved in state[part].items()}
            for part in ("start", "kept")
        )


def length(move: Tensor) -> float:
    """The norm of a tensor, of which processes may have parts."""
    norm: Any = torch.linalg.vector_norm(move)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
