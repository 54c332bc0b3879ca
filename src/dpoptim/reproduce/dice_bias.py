"""The bias of clipping, and error feedback without it (Zhang et al. 2024, App. B.1); no noise.

One parameter x, Huber losses with slope at most C' = ceil(C) + 1, C' records at -1 and one at C':
their mean is least at x = 0. Clipped to C, the far record pulls with C instead of C', and gradient
descent comes to rest at x = C/C' - 1. (The paper prints C'/(C' + C) >= 1/2, which solves another
equation; a distance of at least 1/2 is right for C <= 1.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dpoptim.methods import DiceSGD
from dpoptim.reproduce.private_runs import private_steps
from dpoptim.reproduce.results import pyplot, write_rows

CLIP_NORMS = (0.5, 1.0, 2.0)
LEARNING_RATE = 0.02
START = 1.5


@dataclass(frozen=True)
class Ending:
    """Where a method ended, the mean x of its last passes, and where the analysis says."""

    method: str
    clip_norm: float
    passes: int
    x: float
    expected: float


def bias_of_clipping(
    out: Path, *, clip_norms: Sequence[float] = CLIP_NORMS, passes: int = 400
) -> list[Ending]:
    """Measure all methods; write ``dice_bias.csv`` and ``.png`` into ``out``. Seconds on one core.

    Methods: clipping alone; DiceSGD as published (nothing is lost of a gradient); DiceSGD as
    proven, with R the largest gradient there is and e kept between passes; and with e reset after
    each of them, which keeps part of the bias.
    """
    endings, paths = [], {}
    for clip_norm in clip_norms:
        slope = math.ceil(clip_norm) + 1
        for name, method in methods(clip_norm).items():
            path = descend(method, slope, passes)
            tail = path[-max(1, len(path) // 10) :]
            expected = {"clipped": clip_norm / slope - 1, "DiceSGD, with resets": math.nan}.get(
                name, 0.0
            )
            endings.append(Ending(name, clip_norm, passes, sum(tail) / len(tail), expected))
            paths[name, clip_norm] = path
    write_rows(out / "dice_bias.csv", Ending, endings)
    draw(out / "dice_bias.png", paths)
    return endings


def methods(clip_norm: float) -> dict[str, DiceSGD]:
    slope = float(math.ceil(clip_norm) + 1)
    kept = DiceSGD(clip_norm, clip_norm, slope, reset_each_epoch=False)
    return {
        "clipped": DiceSGD(clip_norm, residual_clip=clip_norm),
        "DiceSGD, R infinite": replace(kept, residual_clip=math.inf),
        "DiceSGD, R finite": kept,
        "DiceSGD, with resets": replace(kept, reset_each_epoch=True),
    }


def descend(method: DiceSGD, slope: int, passes: int) -> list[float]:
    """x after every pass, batches of one record."""
    centres = torch.tensor([-1.0] * slope + [float(slope)], dtype=torch.float64)
    ones = torch.ones(len(centres), 1, dtype=torch.float64)
    loss = partial(nn.functional.huber_loss, delta=float(slope))
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    plan = method.plan(n=len(centres), batch_size=1, epochs=passes, noise_multiplier=0, delta=1e-5)
    data = ones, centres[:, None]
    return [
        float(model.weight.detach())
        for private in private_steps(plan, model, optimizer, data, loss, seed=0)
        if private.steps_done % len(centres) == 0
    ]


def draw(path: Path, paths: dict[tuple[str, float], list[float]]) -> None:
    """x against passes, a panel for each clip norm."""
    plt = pyplot()
    clip_norms = list(dict.fromkeys(clip_norm for _, clip_norm in paths))
    figure, axes = plt.subplots(
        1, len(clip_norms), figsize=(4 * len(clip_norms), 3.4), sharey=True, layout="constrained"
    )
    for axis, clip_norm in zip([axes] if len(clip_norms) == 1 else axes, clip_norms, strict=True):
        for (name, norm), values in paths.items():
            if norm == clip_norm:
                axis.plot(range(1, len(values) + 1), values, label=name, linewidth=1.4)
        axis.axhline(0, color="#6b7280", linewidth=0.8, linestyle=":")
        axis.set(xlabel="passes", title=f"C = {clip_norm:g}", ylim=(-1, START))
    figure.axes[0].set_ylabel("x (the optimum is 0)")
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
