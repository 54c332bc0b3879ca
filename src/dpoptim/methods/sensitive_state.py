"""Private state of a run beside the engine: a method's memory, a clip norm that changes."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dpoptim.assumptions import Assumption
from dpoptim.clipping import ClippingRule


class Peers(Protocol):
    """The processes that hold a part of every vector each. All ask the same, in one order."""

    def norm(self, parts: Sequence[Tensor]) -> float:
        """The Euclidean norm of a vector in parts; the same number in every process."""
        ...

    def total(self, local: Tensor) -> Tensor:
        """The sum of a few numbers over all processes, in the one that releases; else empty."""
        ...

    def known(self, released: Tensor, like: Tensor) -> Tensor:
        """Give every process what that one released; shaped like ``like``."""
        ...


class SensitiveState(Protocol):
    """Secrets of a method during a run: never shown, saved in secret files only."""

    def attach(self, by_unit: Callable[[list[Tensor]], list[list[Tensor]]], peers: Peers) -> None:
        """Learn how a sum divides into what is clipped together, and who has the rest of it.

        Args:
            by_unit: views of what of a sum is in this process, a list for each unit of the
                clipping rule.
        """
        ...

    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        """Return what the gate releases, of the engine's sums of a step (float64, flat, by device).

        What it remembers changes in `released` and `skipped` only: an interrupted step is asked
        again.
        """
        ...

    def released(self, sums: list[list[Tensor]]) -> None:
        """Take note that what `query` returned for these sums is out."""
        ...

    def skipped(self) -> None:
        """Take note of a step that released something else: it only measured."""
        ...

    def secret_state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: tensors, numbers and nests of them. Secret."""
        ...

    def restore(self, secret: dict[str, Any]) -> None:
        """Go on, from a fresh state, where `secret_state` was taken."""
        ...


class NothingKept(SensitiveState):
    """A method that remembers nothing: the gate releases the sum as it is."""

    def attach(self, by_unit: Callable[[list[Tensor]], list[list[Tensor]]], peers: Peers) -> None:
        return None

    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        return sums[0]

    def released(self, sums: list[list[Tensor]]) -> None:
        return None

    def skipped(self) -> None:
        return None

    def secret_state(self) -> dict[str, Any]:
        return {}

    def restore(self, secret: dict[str, Any]) -> None:
        return None


class AdaptiveClipNorm(Protocol):
    """A clip norm that changes by what was released or planned; queries have norm bound 1.

    What is not overridden is that of a plan: nothing is observed, and every step trains.
    """

    rule: ClippingRule
    # the last noisy share of gradients below the clip norm; nan if none was released
    share_below: float

    @property
    def gain(self) -> float:
        """Factor of this step's released sums in `answer`; public. If several: see `shares`."""
        return self.rule.norm

    @property
    def shares(self) -> Sequence[float] | None:
        """Each parameter's factor over `gain`, the root mean square of all entries' factors.

        None: all are 1.
        """
        return None

    @property
    def found(self) -> bool:
        """Whether this step trains; else it only measures."""
        return True

    def meet(self, peers: Peers) -> None:
        """Learn who observes other records of the same steps, and has the rest of the sums."""
        return None

    def see(
        self,
        entries: Sequence[int],
        views: Callable[[list[Tensor]], list[Tensor]],
        deviation: Callable[[int], float],
    ) -> None:
        """Learn what sums are made of, and how noisy they come back.

        Args:
            entries: of each parameter, in all processes together.
            views: flat, of a sum or a release: what is in this process of each parameter.
            deviation: of the noise in every entry of a step's release, by its number.

        Raises:
            ValueError: it cannot work with such noise.
        """
        return None

    def observe(
        self,
        squared_norms: Tensor,
        tapers: Tensor | None = None,
        of_units: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Look at the gradients of some records of the step. Private.

        Args:
            squared_norms: float64, shape (B,).
            tapers: what share of each counts where huge ones fade out; None: all of it.
            of_units: what each unit of the rule has of them.
        """
        return None

    def forget(self) -> None:
        """Drop what was observed of a step that starts again."""
        return None

    def scaled(self, sums: list[list[Tensor]]) -> list[list[Tensor]]:
        """Divide the engine's sums by the clip norm, in place."""
        return [[total.div_(self.rule.norm) for total in each] for each in sums]

    def query(self, sums: list[Tensor]) -> list[Tensor]:
        """From a step's scaled sum to what the gate releases; of the same shapes in every step.

        One record's part of it is at most as long as its part of the scaled sum could be.
        """
        return sums

    @abstractmethod
    def answer(self, released: list[Tensor]) -> list[Tensor] | None:
        """Return a release's noisy sums, None if it only measured; choose the next ``rule``."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs between two steps: released numbers only."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on, from a fresh start, where `state` was taken."""


class FixedClipNorm(AdaptiveClipNorm):
    """A clip norm that stays: sums, which it bounds, are released as they are.

    Args:
        rule: of all steps.
    """

    share_below = math.nan

    def __init__(self, rule: ClippingRule) -> None:
        self.rule = rule

    @property
    def gain(self) -> float:
        return 1.0

    def scaled(self, sums: list[list[Tensor]]) -> list[list[Tensor]]:
        return sums

    def answer(self, released: list[Tensor]) -> list[Tensor]:
        return released

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        return None


class ClipNormPolicy(Protocol):
    """Public, frozen settings of a clip norm that changes, for a method's ``clip_norm``."""

    @property
    def start(self) -> float:
        """The clip norm of the first step."""
        ...

    def begin(
        self,
        rule_of: Callable[[float], ClippingRule],
        *,
        batch_size: int,
        steps: int,
        capacity: int,
    ) -> AdaptiveClipNorm:
        """Return a fresh start for one run.

        Args:
            rule_of: the method's clipping rule at a clip norm.
            batch_size: expected; the public number that counts are divided by.
            steps: of the run.
            capacity: the most records that a step holds; public.
        """
        ...

    def refuse_if_drowned(self, *, batch_size: int, steps: int, deviation: float) -> None:
        """Refuse, by public numbers, where noise would decide.

        Args:
            deviation: of the noise in each step, at norm bound 1.

        Raises:
            ValueError: naming what to change.
        """
        ...

    def assumption(self) -> Assumption:
        """Return what is enforced about it."""
        ...
