"""The processes of one run under ``torch.distributed``.

Two groups of processes are in use: the caller's, for vectors, and one of its own on the CPU, for
agreement. So a rank that fails in the middle of a sum can still say so, and the others still hear
it once their own sum has timed out.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpoptim.accounting.ledger import Ledger
from dpoptim.clipping import Directions
from dpoptim.distributed.c10d_internals import all_gather_single, time_out_of
from dpoptim.distributed.control_groups import control_group, control_groups, lost_groups
from dpoptim.distributed.exchange import Change, add_parts, join_parts, swap, trade
from dpoptim.distributed.ledger_of_ranks import LedgerOfRanks
from dpoptim.distributed.rank_signals import (
    ABOUT,
    ARRIVED,
    COUNT,
    EXCHANGE,
    FAILED,
    LEFT,
    MICROBATCH,
    MOST_MICROBATCHES,
    OTHER_RUN,
    TRIAL,
    portable_error,
    rank_names,
    signs_in_words,
)
from dpoptim.distributed.ranks import Ranks, Shared, part_sizes
from dpoptim.distributed.replicated import ReplicatedTotals
from dpoptim.distributed.roll_call import missing_ranks, tell_failure
from dpoptim.errors import RankError
from dpoptim.gradients.accumulation.summation_groups import Indices, into_groups
from dpoptim.gradients.accumulation.totals import Totals
from dpoptim.methods.error_feedback import norm
from dpoptim.noise.stream import KeyStream, fresh_secret, key_stream

Answer = TypeVar("Answer")
ADDING = "adding up a step's sums"


class ProcessGroup(Ranks):
    """The ranks of a ``torch.distributed`` process group, made on all of them together: `Ranks`.

    Args:
        group: of the training processes. Its time-out holds for everything that they wait for
            here.

    Raises:
        RankError: a rank does not answer, before the group's time-out.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._broken = False
        self._over = False  # whether a rank has left, or all have
        self._alike = True  # whether ranks had the same `Shared` at the last sign
        self._run = 0  # its number, by which ranks tell two runs of theirs apart
        with self._connected("making a group for agreement"):
            control_group(group)
        self._secret: bytes = self.from_first(fresh_secret)
        self._run = int.from_bytes(hashlib.sha256(b"run" + self._secret).digest()[:7], "big")

    @property
    def _control(self) -> dist.ProcessGroup:
        return control_groups[self.group]

    # ---- agreement ------------------------------------------------------------------------------

    def arrive(self, what: str) -> None:
        signs = self._say(ARRIVED, 0)
        failed = [rank for rank, (kind, _) in enumerate(signs) if kind != ARRIVED]
        if failed:
            self._over = True
            raise RankError(
                f"{rank_names(failed)} failed in {what}, and says why itself. Nothing was released."
            )

    def agree(self, facts: Mapping[str, str]) -> None:
        everyone = self.all_gather(dict(facts))
        for key in facts:
            other = [
                rank
                for rank, theirs in enumerate(everyone)
                if theirs.get(key) != everyone[0].get(key)
            ]
            if other:
                raise RankError(
                    f"{rank_names(other)} would not go on with the same {key} as rank 0. Fix: the "
                    "same program, settings, first values of the model and data on every rank "
                    "(sharded=True if each has records of its own)."
                )

    def from_first(self, ask: Callable[[], Answer]) -> Answer:
        box: list[Any] = [None]
        failure: BaseException | None = None
        with self._exchange("waiting for rank 0"):
            if self.rank == 0:
                try:
                    box[0] = (True, ask())
                except BaseException as error:  # an interrupt must not leave the others waiting
                    failure, box[0] = error, (False, portable_error(error))
            dist.broadcast_object_list(box, group=self._control, group_src=0)
        if failure is not None:
            raise failure
        good, answer = box[0]
        if not good:
            raise answer
        return answer

    def together(self, doing: str, act: Callable[[Any], Answer]) -> Answer:
        with self._exchange(doing):
            return act(self._control)

    def begin_microbatch(self, step: int, microbatch: int) -> None:
        self._meet(MICROBATCH, step * MOST_MICROBATCHES + microbatch, f"run a part of step {step}")

    def begin_trial(self, number: int) -> None:
        self._meet(TRIAL, number, "try the model")

    def tell_failure(self, *, failed: bool) -> None:
        tell_failure(self.group, failed=failed)

    def begin(self, what: int, step: int, shared: Shared | None = None) -> None:
        self._meet(what, step, ABOUT[what].format(step), shared)

    def _meet(self, kind: int, place: int, about: str, shared: Shared | None = None) -> None:
        """Go on if all ranks are about to do the same, with the same."""
        signs = self._say(kind, place, shared.number() if shared is not None else 0)
        if all(sign == (kind, place) for sign in signs):
            if shared is not None and not self._alike:
                self.agree(shared.facts())
            return
        self._refuse_others(signs, lambda sign: sign == (kind, place), about)

    def _refuse_others(
        self,
        signs: Sequence[tuple[int, int]],
        together: Callable[[tuple[int, int]], bool],
        about: str,
    ) -> NoReturn:
        """Name the ranks that are about to do something else."""
        self._over = True
        others = signs_in_words([None if together(sign) else sign for sign in signs])
        raise RankError(
            f"rank {self.rank} is about to {about}, but {others}. Nothing of the step "
            "was released. Fix: every rank must go through the same steps, call private.save and "
            "private.finish where the others do, and leave the run after the same step."
        )

    def leave(self, step: int, *, failed: bool) -> None:
        if failed and (self._over or self._broken):
            return
        signs = self._say(FAILED if failed else LEFT, step, quietly=failed)
        self._over = True
        others = signs_in_words([None if sign == (LEFT, step) else sign for sign in signs])
        if others and not failed:
            raise RankError(
                f"rank {self.rank} leaves the run after step {step}, but {others}: the run does "
                "not count as completed. Fix: leave it on all ranks after the same step, with all "
                "their calls of private.save and private.finish before that."
            )

    def _say(
        self, kind: int, step: int, shared: int = 0, *, quietly: bool = False
    ) -> list[tuple[int, int]]:
        """Tell all ranks what this one is about to do; returns what all are.

        ``quietly``: an answer is not needed.
        """
        if self._over:
            raise RankError(
                "this run has ended, or failed, on one of the ranks. Fix: see the first error; "
                "start it again."
            )
        try:
            return self._signs(kind, step, shared)
        except RankError:
            if not quietly:
                raise
        return []

    def _signs(self, kind: int, place: int, shared: int = 0) -> list[tuple[int, int]]:
        """Exchange signs; those that belong to another run say so, and no more."""
        signs = torch.zeros(self.size, 4, dtype=torch.int64)
        with self._connected("agreeing on the next step"):
            mine = torch.tensor([self._run, kind, place, shared], dtype=torch.int64)
            all_gather_single(signs.view(-1), mine, group=self._control)
        self._alike = bool((signs[:, 3] == shared).all())
        return [
            (kind, place) if run == self._run else (OTHER_RUN, 0)
            for run, kind, place, _ in signs.tolist()
        ]

    @contextmanager
    def _exchange(self, doing: str) -> Iterator[None]:
        """Talk in the group on the CPU, once all ranks are about to do so.

        A rank that says something else meanwhile would end the others' processes.
        """
        signs = self._signs(EXCHANGE, 0)
        if others := signs_in_words([None if sign[0] == EXCHANGE else sign for sign in signs]):
            self._over = True
            raise RankError(
                f"rank {self.rank} is {doing}, but {others}. Fix: see the error of that rank; all "
                "must make the same calls in the same order."
            )
        with self._connected(doing):
            yield

    def lost(self, error: BaseException | None) -> RankError | None:
        """Explain an error of `torch.distributed` in a wrapper's communication; else None."""
        theirs = isinstance(error, dist.DistError) or (
            type(error) is RuntimeError and "gloo" in str(error).lower()
        )
        if not theirs:
            return None
        try:
            with self._connected("running the model"):
                raise RuntimeError from error
        except RankError as found:
            return found

    def all_gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        with self._exchange("gathering what the ranks have"):
            dist.all_gather_object(everyone, mine, group=self._control)
        return everyone

    def all_sum(self, number: int) -> int:
        total = torch.tensor([number], dtype=torch.int64)
        with self._exchange("adding up the ranks' numbers of records"):
            dist.all_reduce(total, group=self._control)
        return int(total)

    def all_max(self, number: int) -> int:
        signs = self._say(COUNT, number)
        if any(kind != COUNT for kind, _ in signs):
            self._refuse_others(
                signs, lambda sign: sign[0] == COUNT, "agree on the microbatches of a step"
            )
        return max(number for _, number in signs)

    # ---- what is written, and drawn -------------------------------------------------------------

    def ledger(self, ledger: Ledger) -> Ledger:
        if (
            any(given := self.all_gather(ledger.durable or ledger.budget is not None))
            and not given[0]
        ):
            raise ValueError(
                f"ledger was given on {rank_names([rank for rank, it in enumerate(given) if it])}, "
                "but not on rank 0, which alone charges. Fix: give it on rank 0."
            )
        return LedgerOfRanks(ledger, self.from_first)

    def own_stream(self, seed: int | None, purpose: str) -> KeyStream:
        return key_stream(seed, f"{purpose} of rank {self.rank} of {self.size}")

    def common_stream(self, seed: int | None, purpose: str) -> KeyStream:
        return (
            KeyStream.from_secret(self._secret, purpose)
            if seed is None
            else KeyStream.from_seed(seed, purpose)
        )

    def dealer(self, coins: KeyStream) -> Callable[[Indices], Indices]:
        return lambda indices: into_groups(coins, indices, self.size)[self.rank]

    # ---- sums -----------------------------------------------------------------------------------

    def totals(self, parameters: Sequence[nn.Parameter], directions: Directions) -> Totals:
        return ReplicatedTotals(self, parameters, directions)

    def sum_parts(self, vector: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Add up this rank's part, in place; see `Ranks` and `exchange.add_parts`."""
        parts = vector.split([*(sizes or part_sizes(len(vector), self.size))])
        with self._connected(ADDING):
            add_parts(parts, self.rank, self.group)
        return parts[self.rank]

    def trade(self, given: Tensor, sizes: Sequence[int], entries: int) -> Callable[[], Tensor]:
        with self._connected(ADDING):
            arrive = trade(given, sizes, entries, self.rank, self.group)
        return self._connected(ADDING)(arrive)

    def swap(self, given: Sequence[Tensor]) -> list[Tensor]:
        with self._connected(ADDING):
            return swap(given, self.group)

    def join_parts(
        self, part: Tensor, into: Sequence[Tensor], sent: Change = lambda stretch: stretch
    ) -> None:
        sizes = part_sizes(sum(map(len, into)), self.size)
        with self._connected("handing out a step's release"):
            join_parts(part, sizes, into, self.group, sent)

    def norm(self, parts: Sequence[Tensor]) -> float:
        lengths = torch.zeros(self.size, dtype=torch.float64)
        with self._exchange("measuring a vector"):
            mine = torch.tensor([norm(parts)], dtype=torch.float64)
            all_gather_single(lengths, mine, group=self._control)
        return math.hypot(*lengths.tolist())

    def total(self, local: Tensor) -> Tensor:
        total = local.detach().cpu().clone()
        with self._exchange("adding up a step's numbers"):
            dist.reduce(total, group=self._control, group_dst=0)
        return total if self.rank == 0 else local.new_empty(0)

    def known(self, released: Tensor, like: Tensor) -> Tensor:
        released = released if self.rank == 0 else torch.empty_like(like)
        with self._exchange("waiting for what rank 0 released"):
            dist.broadcast(released, group=self._control, group_src=0)
        return released

    def broadcast(self, tensor: Tensor) -> Tensor:
        with self._exchange("waiting for a tensor of rank 0"):
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._control, group_src=0)
        return tensor

    @contextmanager
    def _connected(self, doing: str) -> Iterator[None]:
        """Name who is missing where communication fails."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # what torch.distributed raises, whatever the backend
            self._broken = True
            lost_groups.add(self.group)
            raise RankError(
                f"rank {self.rank} lost the others while {doing}: {missing_ranks(self.group)}. "
                "What was reserved stays charged. Fix: see the error of that rank; then start all "
                "again, from a checkpoint if there is one. (The time-out is "
                f"{time_out_of(self.group)}, the argument timeout of init_process_group.)"
            ) from error
