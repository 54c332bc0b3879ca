"""Losses of preference pairs, one a pair, as TRL's ``DPOTrainer`` defines them for a pair alone.

What it averages over all tokens of a batch is averaged over each pair's own here, and losses that
sort a batch (``aot``) are left out: in them pairs weigh each other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Scored pairs; tensors of shape (pairs,).

    Attributes:
        chosen, rejected: log-probability of each completion, over the reference's.
        chosen_score, rejected_score: the same after the f-divergence's transformation.
        chosen_length, rejected_length: tokens of the completions, at least 1.
        likelihood: mean log-probability of a token of the chosen completion.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    likelihood: Tensor


@dataclass(frozen=True)
class Settings:
    """Settings of ``trl.DPOConfig``: ``beta``, ``label_smoothing`` and ``discopop_tau``."""

    beta: float
    label_smoothing: float
    discopop_tau: float


PairLoss = Callable[[Pairs, Settings], Tensor]
DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_kl": lambda ratio: ratio,
    "forward_kl": lambda ratio: 1 - torch.exp(-ratio),
    "js_divergence": lambda ratio: math.log(2) + F.logsigmoid(ratio),
}


def margin(pairs: Pairs, settings: Settings) -> Tensor:
    """Beta times how much more the model prefers the chosen completion than the reference does."""
    return settings.beta * (pairs.chosen_score - pairs.rejected_score)


def margin_of_a_token(pairs: Pairs) -> Tensor:
    return pairs.chosen_score / pairs.chosen_length - pairs.rejected_score / pairs.rejected_length


def robust(pairs: Pairs, settings: Settings) -> Tensor:
    flipped, m = settings.label_smoothing, margin(pairs, settings)
    return (flipped * F.logsigmoid(-m) - (1 - flipped) * F.logsigmoid(m)) / (1 - 2 * flipped)


def exo_pair(pairs: Pairs, settings: Settings) -> Tensor:
    smoothing, m = settings.label_smoothing, margin(pairs, settings)
    won = m.sigmoid() * (F.logsigmoid(m) - math.log1p(-smoothing))
    return won + (-m).sigmoid() * (F.logsigmoid(-m) - math.log(smoothing))


def nca_pair(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = settings.beta * pairs.chosen, settings.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def discopop(pairs: Pairs, settings: Settings) -> Tensor:
    m = margin(pairs, settings)
    modulation = torch.sigmoid(m / settings.discopop_tau)
    return -F.logsigmoid(m) * (1 - modulation) + torch.exp(-m) * modulation


LOSSES: dict[str, PairLoss] = {
    "sigmoid": lambda pairs, settings: -F.logsigmoid(margin(pairs, settings)),
    "hinge": lambda pairs, settings: torch.relu(1 - margin(pairs, settings)),
    "ipo": lambda pairs, settings: (margin_of_a_token(pairs) - 0.5 / settings.beta).square(),
    "sigmoid_norm": lambda pairs, settings: -F.logsigmoid(settings.beta * margin_of_a_token(pairs)),
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": lambda pairs, settings: (
        -F.logsigmoid(settings.beta * pairs.chosen) - F.logsigmoid(-settings.beta * pairs.rejected)
    ),
    "sppo_hard": lambda pairs, settings: (
        (pairs.chosen - 0.5 / settings.beta).square()
        + (pairs.rejected + 0.5 / settings.beta).square()
    ),
    "apo_zero": lambda pairs, settings: (
        torch.sigmoid(-settings.beta * pairs.chosen) + torch.sigmoid(settings.beta * pairs.rejected)
    ),
    "apo_down": lambda pairs, settings: (
        torch.sigmoid(settings.beta * pairs.chosen)
        + torch.sigmoid(-settings.beta * (pairs.chosen - pairs.rejected))
    ),
    "discopop": discopop,
    "sft": lambda pairs, settings: -pairs.likelihood,
}
