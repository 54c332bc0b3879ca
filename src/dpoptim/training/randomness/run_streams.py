"""The streams of randomness of one run."""

from collections.abc import Callable
from typing import Any

from dpoptim.distributed.ranks import Ranks
from dpoptim.noise.stream import KeyStream
from dpoptim.training.checkpoints.earlier_part import EarlierPart


class RunStreams:
    """Makes the streams of a run, each for a purpose of its own.

    Without a seed all are keyed by the operating system, and a resumed run has fresh ones. With one
    (for tests) a resumed run goes on where its streams were, so it does what it would have done
    uninterrupted; in another number of processes, whose streams are others, it takes such as were
    never used.

    Args:
        ranks: whose streams they are.
        seed: integer >= 0, or None.
        earlier: what the run goes on from.
    """

    def __init__(self, ranks: Ranks, seed: int | None, earlier: EarlierPart) -> None:
        self._ranks, self.seed = ranks, seed
        self._made: dict[str, KeyStream] = {}
        self._suffix, self._reached = "", {}
        if seed is None or earlier.contents is None:
            return
        saved = earlier.contents["streams"]
        if len(saved) == ranks.size:
            self._suffix, self._reached = saved[ranks.rank]["suffix"], saved[ranks.rank]["reached"]
        else:
            self._suffix = f" after step {earlier.steps_done}"

    def own(self, purpose: str) -> KeyStream:
        """This process's own; see `Ranks.own_stream`."""
        return self._placed(purpose, self._ranks.own_stream(self.seed, purpose + self._suffix))

    def common(self, purpose: str) -> KeyStream:
        """That of all processes; see `Ranks.common_stream`."""
        return self._placed(purpose, self._ranks.common_stream(self.seed, purpose + self._suffix))

    def of_steps(self, purpose: str) -> Callable[[int], KeyStream]:
        """One for each step of the run, by its number: for what may be done again, or ahead."""
        return lambda step: self._ranks.own_stream(self.seed, f"{purpose} of step {step}")

    def _placed(self, purpose: str, stream: KeyStream) -> KeyStream:
        if purpose in self._reached:
            stream.skip_to(*self._reached[purpose])
        self._made[purpose] = stream
        return stream

    def reached(self) -> list[dict[str, Any]]:
        """Tell, for a checkpoint, how far streams have come; of each process, if seeded."""
        if self.seed is None:
            return []
        reached = {purpose: list(stream.reached) for purpose, stream in self._made.items()}
        return self._ranks.all_gather({"suffix": self._suffix, "reached": reached})
