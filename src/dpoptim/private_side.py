"""What a run keeps left of the gate beside the engine: what a method remembers, and a search for the clip norm."""

from typing import Any, Protocol

from torch import Tensor

from dpoptim.clipping import ClippingRule


class PrivateSide(Protocol):
    """What a method keeps to itself during a run, left of the gate: never shown, saved in secret files only."""

    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        """From the engine's sums of a step (one list of flat float64 vectors for each sum) to what the gate releases.

        What it remembers changes in `released` only: an interrupted step is asked again.
        """
        ...

    def released(self, sums: list[list[Tensor]]) -> None:
        """What `query` returned for these sums is out."""
        ...

    def secret_state(self) -> dict[str, Any]:
        """What a checkpoint needs: tensors, numbers and nests of them. Secret."""
        ...

    def restore(self, secret: dict[str, Any]) -> None:
        """Go on, from a fresh state, where `secret_state` was taken."""
        ...


class NormChoice(Protocol):
    """A clip norm that a run chooses from what it has released; every step is a query with norm bound 1."""

    rule: ClippingRule
    share_below: float  # the last noisy share of gradients below the clip norm; nan if none was released

    @property
    def found(self) -> bool:
        """Whether steps train."""
        ...

    def observe(self, squared_norms: Tensor, tapers: Tensor | None = None) -> None:
        """Squared norms of the gradients of some records of the step, float64, shape (B,), and what share of each counts
        where huge ones fade out (None: all of it). Private.
        """
        ...

    def forget(self) -> None:
        """Drop what was observed of a step that starts again."""
        ...

    def query(self, sums: list[Tensor]) -> list[Tensor]:
        """From the step's clipped sums to what the gate releases: one record adds a vector of norm at most 1."""
        ...

    def answer(self, released: list[Tensor]) -> list[Tensor] | None:
        """The noisy sums in what was released, or None if the step only measured; chooses the next step's ``rule``."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs between two steps: released numbers only."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on, from a fresh search, where `state` was taken."""
        ...
