"""The processes of one run: what they agree on, add up and hand out.

`Ranks` is the ordinary case, one process, in which nothing travels; `ProcessGroup` any number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from dpoptim.accounting.ledger import Ledger
from dpoptim.clipping import Directions
from dpoptim.distributed.exchange import Change, write
from dpoptim.errors import RankError
from dpoptim.gradients.accumulation.totals import Totals
from dpoptim.methods.error_feedback import norm
from dpoptim.noise.stream import KeyStream, key_stream
from dpoptim.sampling import Indices

Answer = TypeVar("Answer")


class Shared(Protocol):
    """Public values that must be the same on all ranks: a checksum, and the same by names."""

    def number(self) -> int: ...

    def facts(self) -> dict[str, str]: ...


class Ranks:
    """The processes of one run, numbered from 0, as one of them sees them: here, one alone.

    All call the same methods in the same order. `ProcessGroup` says all of them anew.
    """

    rank, size = 0, 1

    def arrive(self, what: str) -> None:
        """Wait until all ranks have got as far as this.

        A rank that cannot calls `leave` with ``failed=True``.

        Raises:
            RankError: one has failed; named.
        """

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare what the ranks are about to do, by name; the texts stay among them.

        Raises:
            RankError: on all ranks, naming those that differ from rank 0, and in what.
        """

    def from_first(self, ask: Callable[[], Answer]) -> Answer:
        """Ask on rank 0 alone, and have its answer, or its error, everywhere."""
        return ask()

    def together(self, doing: str, act: Callable[[Any], Answer]) -> Answer:
        """Do what communicates by itself, in the ranks' group on the CPU; None of one process.

        Raises:
            RankError: one is lost while it is done; named.
        """
        return act(None)

    def ledger(self, ledger: Ledger) -> Ledger:
        """A ledger that only rank 0 writes.

        Raises:
            ValueError: on all ranks: one that was given to another rank alone would stay empty.
        """
        return ledger

    def own_stream(self, seed: int | None, purpose: str) -> KeyStream:
        """Randomness of this rank, independent of that of all others; OS-keyed without a seed."""
        return key_stream(seed, purpose)

    def common_stream(self, seed: int | None, purpose: str) -> KeyStream:
        """Randomness that all ranks have in common: each finds the same words in it."""
        return self.own_stream(seed, purpose)

    def dealer(self, coins: KeyStream) -> Callable[[Indices], Indices]:
        """Deal batches, which all ranks draw the same, and take this rank's parts.

        Args:
            coins: decide; all ranks have them in common.

        **Guarantee.** Every record of a batch is in exactly one rank's part, chosen by a coin of
        its own.
        """
        return lambda indices: indices

    def totals(self, parameters: Sequence[nn.Parameter], directions: Directions) -> Totals:
        """Where the sums of this rank's records live, and become the sums of all ranks'."""
        return Totals(parameters, directions)

    def sum_parts(self, vector: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Add up all ranks' vectors, and return this rank's part of the sum.

        They are float64, flat and equally long.

        Args:
            sizes: of the ranks' parts, in order; see `part_sizes`.
        """
        return vector

    def trade(self, given: Tensor, sizes: Sequence[int], entries: int) -> Callable[[], Tensor]:
        """Begin to send every other rank its own vector; see `exchange.trade`."""
        return lambda: given.new_empty(0, entries)

    def swap(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Give each rank its own tensor, and return what each gives this one, in order.

        They differ in their first lengths alone.
        """
        return [*given]

    def join_parts(
        self, part: Tensor, into: Sequence[Tensor], sent: Change = lambda stretch: stretch
    ) -> None:
        """Write all ranks' parts of a vector, in order; see `exchange.join_parts`.

        Args:
            part: this rank's; see `part_sizes`.
            into: flat tensors that follow each other, of any dtypes.
            sent: what is handed out of a stretch of the part.
        """
        write(into, 0, sent(part))

    def norm(self, parts: Sequence[Tensor]) -> float:
        """The norm of a vector of which each rank has a part; the same number on every rank."""
        return norm(parts)

    def total(self, local: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks, a new tensor on rank 0; else empty."""
        return local

    def known(self, released: Tensor, like: Tensor) -> Tensor:
        """Give every rank what rank 0 released; shaped like ``like``."""
        return released

    def broadcast(self, tensor: Tensor) -> Tensor:
        """A tensor, contiguous and on the CPU, filled with what rank 0's holds."""
        return tensor

    def all_gather(self, mine: Any) -> list[Any]:
        """Gather what each rank hands over, in order."""
        return [mine]

    def all_sum(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        return number

    def all_max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return number

    def begin_microbatch(self, step: int, microbatch: int) -> None:
        """Begin this microbatch of this step on all ranks, which go through its passes together.

        Raises:
            RankError: one is elsewhere, has left, or has failed; named.
        """

    def begin_trial(self, number: int) -> None:
        """Begin this pass of a model that is tried, on all ranks; as `begin_microbatch`."""

    def tell_failure(self, *, failed: bool) -> None:
        """Leave word that this rank failed, for those that wait in vain; or take it back."""

    def begin(self, what: int, step: int, shared: Shared | None = None) -> None:
        """All ranks are about to do the same with this step: what `rank_signals.ABOUT` names.

        Args:
            shared: is compared on the way.

        Raises:
            RankError: one is at another step, has left, has failed, or has something else; named.
        """

    def lost(self, error: BaseException | None) -> RankError | None:
        """The error that names who is missing, of one in a wrapper's communication; or None."""
        return None

    def leave(self, step: int, *, failed: bool) -> None:
        """All ranks leave the run here.

        Raises:
            RankError: one goes on, or has failed; never if this rank failed itself.
        """


ALONE = Ranks()


def part_sizes(entries: int, size: int) -> list[int]:
    """Entries of a vector that each rank owns: equally many, but for what the last ones lack."""
    each = -(-entries // size)
    return [min(each, max(0, entries - rank * each)) for rank in range(size)]
