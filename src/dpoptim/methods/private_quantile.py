"""A clip norm that the run finds: a quantile of gradient norms, paid from its own budget.

Every step of the run is one Gaussian query of noise multiplier z on a sum to which one record adds
a vector of norm at most 1. What the vector holds may be decided from what earlier steps released,
so that the whole run costs what it costs with a fixed clip norm:

* ``"at the start"``: the first steps release a histogram of the logarithms of the norms; one
  record adds 1 to one bin. The rest of the steps train, on gradients divided by the clip norm that
  was found.
* ``"all along"`` (Andrew et al. 2021): every step releases gradients and the count of norms below
  C together: the vector ``(sqrt(1 - s) g / C, sqrt(s) (2 b - 1))`` with ``|g| <= C`` and b in {0,
      1} has norm at most 1 for every C.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpoptim.arguments import number_from_zero, one_of, positive_number, proportion
from dpoptim.assumptions import Assumption, enforced
from dpoptim.clipping import Clipping, ClippingRule
from dpoptim.gradients.arithmetic.products import COMMON_FACTOR_ERROR
from dpoptim.methods.sensitive_state import AdaptiveClipNorm, Peers
from dpoptim.opacus_words import KnowsOpacus

# log2 of the norms that bins tell apart; the first and the last bin hold the rest
LOWEST, HIGHEST = -19.0, 10.0
LEAST_OCTAVE = -40.0  # log2 of the norm above which records vote, fully an octave further up
VOTE_OCTAVES = 0.25  # around C, in which a vote goes from "below" to "above"
BINS_PER_OCTAVE = 2
# How fast a vote, in units of its largest size, moves with the natural logarithm of its norm: by
# its place and its weight.
SLOPE = (2 * max(BINS_PER_OCTAVE, 1 / VOTE_OCTAVES) + 1 + 1 / 8) / math.log(2)
BINS = round((HIGHEST - LOWEST) * BINS_PER_OCTAVE) + 2
LEAST_SIGNAL = 3.0  # expected count below the quantile, in standard deviations of the noise on it
When = Literal["at the start", "all along"]


@dataclass(frozen=True)
class PrivateQuantile(KnowsOpacus):
    """A clip norm: the ``quantile`` of the norms of the records' gradients, found privately.

    The update is the noisy mean of gradients clipped to it, as with a fixed clip norm;
    `PrivateTraining.clip_norm` says what was found (it is public then), for whoever scales the
    learning rate by it.

    Args:
        quantile: share of the records that stay unclipped, in (0, 1); low ones are Das et al.'s
            advice.
        share: of the run's budget (of the square of mu) that the search takes, in (0, 1).
        when: ``"at the start"``: the first ``share`` of the steps measure and do not move the
            model. ``"all along"``: every step adjusts C by a factor of at most ``exp(rate)``.
        start: C of the first steps, if ``when="all along"``; > 0.
        rate: how fast C moves then; >= 0. At 0 it stays: `monitor`.

    Examples:
        >>> import dpoptim
        >>> method = dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.1))
        >>> plan = method.plan(n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6)
        >>> plan.guarantee.epsilon <= 4.0  # the search is inside the budget
        True
    """

    quantile: float = 0.5
    share: float = 0.05
    when: When = "at the start"
    start: float = 1.0
    rate: float = 0.2

    def __post_init__(self) -> None:
        for name in ("quantile", "share"):
            object.__setattr__(self, name, proportion(name, getattr(self, name)))
        one_of("when", self.when, get_args(When))
        object.__setattr__(self, "start", positive_number("start", self.start))
        object.__setattr__(self, "rate", number_from_zero("rate", self.rate))
        _ = Clipping(self.start)  # validates

    @classmethod
    def monitor(cls, clip_norm: float, share: float = 0.01) -> "PrivateQuantile":
        """A fixed clip norm and a noisy count of gradients below it (Fang et al. 2023, Fig. 1).

        `PrivateTraining.share_unclipped` has it. With noise_multiplier=0, for public data, it is
        exact.
        """
        return cls(0.5, share, "all along", clip_norm, 0.0)

    def measuring_steps(self, steps: int) -> int:
        """How many of the run's steps only measure."""
        return max(1, round(self.share * steps)) if self.when == "at the start" else 0

    def begin(
        self,
        rule_of: Callable[[float], ClippingRule],
        *,
        batch_size: int,
        steps: int,
        capacity: int,
    ) -> "QuantileSearch":
        return QuantileSearch(self, rule_of, batch_size=batch_size, steps=steps, capacity=capacity)

    def refuse_if_drowned(self, *, batch_size: int, steps: int, deviation: float) -> None:
        measuring = self.measuring_steps(steps)
        if measuring >= steps:
            raise ValueError(
                f"share={self.share:g} of {steps} steps leaves none to train; plan more steps."
            )
        if measuring:
            signal = min(self.quantile, 1 - self.quantile) * batch_size * math.sqrt(measuring)
            noise = deviation * math.sqrt(BINS)
        else:  # what is left of a step's noise after the steps that C takes to move by e
            signal = min(self.quantile, 1 - self.quantile) * batch_size
            noise = deviation / (2 * math.sqrt(self.share)) * math.sqrt(self.rate)
        if signal < LEAST_SIGNAL * noise:
            raise ValueError(
                f"the search for the {self.quantile:g} quantile would follow the noise: "
                f"{signal:.3g} records against a standard deviation of {noise:.3g}. Use a larger "
                "batch_size, share, quantile or epsilon, or fix clip_norm."
            )

    def assumption(self) -> Assumption:
        if self.rate == 0 and self.when == "all along":
            return enforced(
                "each step releases a noisy count of unclipped gradients, which the guarantee "
                "covers",
            )
        where = "in steps of their own" if self.when == "at the start" else "in every step"
        return enforced(
            f"the clip norm was found from noisy counts {where}, which the guarantee covers"
        )


class QuantileSearch(AdaptiveClipNorm):
    """One run's search. Public, but for what it has observed since the last step.

    Args:
        quantile: its settings. The others as for `ClipNormPolicy.begin`.

    **Guarantee.** What `query` returns moves by at most 1 with one record that moves the scaled
    sums by at most 1. Votes do not jump with the norm: under a mean all norms are rounded
    together, by up to 42 * 2^-24 of their length depending on how many records there are, and the
    others' votes may move by that times `SLOPE` each, which is taken off every vote.
    """

    def __init__(
        self,
        quantile: PrivateQuantile,
        rule_of: Callable[[float], ClippingRule],
        *,
        batch_size: int,
        steps: int,
        capacity: int,
    ) -> None:
        self._settings, self._rule_of = quantile, rule_of
        self._batch_size = batch_size
        self._total: Callable[[Tensor], Tensor] = lambda local: local
        self._known: Callable[[Tensor, Tensor], Tensor] = lambda released, like: released
        self._shrunk = 1 / (1 + SLOPE * capacity * COMMON_FACTOR_ERROR)
        self._measuring = quantile.measuring_steps(steps)
        self._histogram = torch.zeros(BINS, dtype=torch.float64, device="cpu")
        self._count = 0.0  # of norms at most C, less half of the records
        self.observed = torch.zeros_like(self._histogram)
        self.rule = rule_of(quantile.start)
        self.share_below = math.nan

    @property
    def gain(self) -> float:
        if self._settings.when == "at the start":
            return self.rule.norm
        return self.rule.norm / math.sqrt(1 - self._settings.share)

    @property
    def found(self) -> bool:
        return self._measuring == 0

    def meet(self, peers: Peers) -> None:
        self._total, self._known = peers.total, peers.known

    def observe(
        self,
        squared_norms: Tensor,
        tapers: Tensor | None = None,
        of_units: Mapping[str, Tensor] | None = None,
    ) -> None:
        octaves = squared_norms.to("cpu", torch.float64).log2() / 2
        # Under zero-out a record may be there with gradient zero, measured as next to nothing: it
        # must not vote either.
        votes = (octaves - LEAST_OCTAVE).clamp(0, 1).nan_to_num(nan=0.0)
        if tapers is not None:  # what counts less in the sum votes less
            votes = votes * tapers.to("cpu", torch.float64)
        octaves = octaves.nan_to_num(nan=0.0)
        if self._measuring:
            self.observed += histogram(octaves, votes * self._shrunk)
        else:
            below = ((math.log2(self.rule.norm) - octaves) / VOTE_OCTAVES).clamp(-0.5, 0.5)
            self._count += float((below * votes).sum()) * self._shrunk

    def query(self, sums: list[Tensor]) -> list[Tensor]:
        """Sums and counts together; zeros in the place of what a step is not for.

        That the shapes stay the same lets noise be correlated over the steps.
        """
        if self._settings.when == "at the start":
            if self._measuring:
                return [*(total.zero_() for total in sums), self._total(self.observed)]
            return [*sums, self._total(torch.zeros_like(self.observed))]
        kept, spent = math.sqrt(1 - self._settings.share), math.sqrt(self._settings.share)
        count = torch.tensor([2 * spent * self._count], dtype=torch.float64, device="cpu")
        return [*(total.mul_(kept) for total in sums), self._total(count)]

    def answer(self, released: list[Tensor]) -> list[Tensor] | None:
        norm = self.rule.norm
        *sums, counts = released
        if self._measuring:
            self._histogram += self._known(counts, self._histogram)
            self._measuring -= 1
            if not self._measuring:
                self.rule = self._rule_of(quantile_of(self._histogram, self._settings.quantile))
            self.forget()
            return None
        self.forget()
        if self._settings.when == "at the start":
            return [total.mul_(norm) for total in sums]
        share = self._settings.share
        below = float(self._known(counts, torch.zeros(1, dtype=torch.float64, device="cpu")))
        below = below / (2 * math.sqrt(share)) / self._shrunk / self._batch_size + 0.5
        self.share_below = below
        factor = math.exp(
            -self._settings.rate * (min(max(below, 0.0), 1.0) - self._settings.quantile)
        )
        # may lie outside of what is searched, and stays there where the rate is 0
        start = self._settings.start
        lowest, highest = min(start, 2**LOWEST), max(start, 2**HIGHEST)
        self.rule = self._rule_of(min(max(norm * factor, lowest), highest))
        return [total.mul_(norm / math.sqrt(1 - share)) for total in sums]

    def forget(self) -> None:
        self.observed = torch.zeros_like(self.observed)
        self._count = 0.0

    def state(self) -> dict[str, Any]:
        return {
            "norm": self.rule.norm,
            "measuring": self._measuring,
            "histogram": self._histogram.clone(),
            "share_below": self.share_below,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rule = self._rule_of(state["norm"])
        self._measuring, self.share_below = state["measuring"], state["share_below"]
        self._histogram = state["histogram"].clone()


def histogram(octaves: Tensor, votes: Tensor) -> Tensor:
    """Sums of votes for norms 2^octaves in `BINS` bins, each shared by the two nearest."""
    places = ((octaves - LOWEST) * BINS_PER_OCTAVE + 0.5).clamp(0, BINS - 1)
    lower = places.floor().clamp(max=BINS - 2)
    upper_share = places - lower
    counts = torch.zeros(BINS, dtype=torch.float64, device="cpu")
    counts.index_add_(0, lower.long(), votes * (1 - upper_share))
    return counts.index_add_(0, lower.long() + 1, votes * upper_share)


def quantile_of(noisy: Tensor, quantile: float) -> float:
    """The norm below which a noisy histogram has a share ``quantile``; geometric in a bin."""
    from sklearn.isotonic import isotonic_regression

    shares = isotonic_regression(np.cumsum(noisy.numpy()))
    target = quantile * max(float(shares[-1]), 1.0)
    place = min(int(np.searchsorted(shares, target)), BINS - 1)
    before = float(shares[place - 1]) if place else 0.0
    inside = (target - before) / (float(shares[place]) - before) if shares[place] > before else 0.5
    edge = LOWEST + (place - 1 + min(max(inside, 0.0), 1.0)) / BINS_PER_OCTAVE
    return float(2 ** min(max(edge, LOWEST), HIGHEST))
