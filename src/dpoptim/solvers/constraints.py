"""Closed, convex, public constraint sets; projecting what was released is post-processing."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dpoptim.arguments import positive_number


class Constraint(Protocol):
    """A closed convex set of parameter vectors."""

    def project(self, w: Tensor) -> Tensor:
        """The nearest point of the set; shape (d,) to shape (d,)."""
        ...


@dataclass(frozen=True)
class Everywhere:
    """No constraint."""

    def project(self, w: Tensor) -> Tensor:
        return w


@dataclass(frozen=True)
class Ball:
    """Points at most ``radius`` (> 0) from the origin.

    Args:
        radius: > 0.

    Raises:
        ValueError: another radius.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Ball
        >>> Ball(1.0).project(torch.tensor([3.0, 4.0], dtype=torch.float64))
        tensor([0.6000, 0.8000], dtype=torch.float64)
    """

    radius: float

    def __post_init__(self) -> None:
        positive_number("radius", self.radius)

    def project(self, w: Tensor) -> Tensor:
        norm = float(w.norm())
        return w * (self.radius / norm) if norm > self.radius else w


@dataclass(frozen=True)
class Box:
    """Points with every coordinate in [lower, upper].

    Args:
        lower, upper: lower < upper.

    Raises:
        ValueError: an empty box.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Box
        >>> Box(-1.0, 1.0).project(torch.tensor([3.0, 0.5], dtype=torch.float64))
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise ValueError(
                f"lower must be at most upper, got lower={self.lower!r}, upper={self.upper!r}."
            )

    def project(self, w: Tensor) -> Tensor:
        return w.clamp(self.lower, self.upper)
