"""Privacy bugs of points that a run keeps or moves, put into this library for as long as a
``with`` lasts. For testing detectors only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from dpoptim.gate import Gate
from dpoptim.training.iterates import Iterates


@contextmanager
def sums_overheard() -> Iterator[list[Tensor]]:
    """Listen to what goes into the gate, before it has noise."""
    heard: list[Tensor] = []
    honest = Gate.release_sum

    def release_sum(gate: Gate, sums: Sequence[Tensor]) -> list[Tensor]:
        heard.append(torch.cat([each.detach().double().flatten() for each in sums]))
        return honest(gate, sums)

    with patch.object(Gate, "release_sum", release_sum):
        yield heard


@contextmanager
def shortest_gradient_kept() -> Iterator[None]:
    """The point with the shortest sum of gradients, looked up without noise."""
    with sums_overheard() as heard:

        def leave(iterates: Iterates) -> None:
            lengths = [float(each.norm()) for each in heard]
            if lengths[-1] == min(lengths):
                iterates._kept = iterates._copies()

        with patch.object(Iterates, "leave", leave):
            yield


@contextmanager
def last_point_kept() -> Iterator[None]:
    """Always the last one that a step left, where a random one is promised."""

    def leave(iterates: Iterates) -> None:
        iterates._kept = iterates._copies()

    with patch.object(Iterates, "leave", leave):
        yield


@contextmanager
def projected_before_noise() -> Iterator[None]:
    """A ball around where the step without noise would have led."""
    honest = Iterates.project
    with sums_overheard() as heard:

        def project(iterates: Iterates) -> None:
            moves = heard[-1].split([p.numel() for p in iterates._parameters.values()])
            start = dict(iterates._start)
            for move, (name, p) in zip(moves, start.items(), strict=True):
                iterates._start[name] = p - move.view_as(p) / len(move)
            honest(iterates)
            iterates._start = start

        with patch.object(Iterates, "project", project):
            yield


@contextmanager
def half_projected() -> Iterator[None]:
    """Each tensor has a ball of its own, and the whole is in none."""

    def project(iterates: Iterates) -> None:
        assert iterates._radius is not None
        with torch.no_grad():
            for name, p in iterates._parameters.items():
                move = p.double() - iterates._start[name]
                p.copy_(
                    iterates._start[name] + move * min(1.0, iterates._radius / float(move.norm()))
                )

    with patch.object(Iterates, "project", project):
        yield
