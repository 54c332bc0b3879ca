"""DiceSGD's thresholds and learning rates (cf. Zhang et al. 2024, Figs. 2, 3), proven noise."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from dpoptim.methods import DiceSGD
from dpoptim.reproduce.dice_cases import Case
from dpoptim.reproduce.dice_table import train
from dpoptim.reproduce.one_pass import DELTA
from dpoptim.reproduce.results import deviation, pyplot, write_rows

EPSILON = 2.0
CLIP_NORMS = (0.03, 0.1, 0.3, 1.0, 3.0)
FEEDBACKS = (0.0, 0.3, 1.0, 3.0, 10.0)  # C2 / C1; 0: no feedback
RESIDUALS = (1.0, 1.5, 2.0, 4.0, 8.0)  # R / C1; 1: nothing to feed back
STEPS = (16.0, 32.0, 64.0, 128.0, 256.0)  # learning rate times C1
# where the other settings are held
BEST = {"clip_norm": 0.3, "feedback": 1.0, "residual": 2.0, "step": 128.0}
BATCH_SIZE, EPOCHS = 4000, 20


@dataclass(frozen=True)
class Cell:
    """Test score over seeds; ``panel`` says which two settings vary."""

    panel: str
    clip_norm: float
    feedback: float
    residual: float
    step: float
    score: float
    standard_deviation: float
    seeds: int


PANELS = {
    "fig2": ("clip_norm", CLIP_NORMS, "feedback", FEEDBACKS),
    "fig3": ("clip_norm", CLIP_NORMS, "step", STEPS),
    "residual": ("feedback", FEEDBACKS, "residual", RESIDUALS),
}


def dice_ablations(
    out: Path, case: Case, *, seeds: int = 3, panels: Sequence[str] = tuple(PANELS)
) -> list[Cell]:
    """Measure panels at epsilon 2, zero-out; write ``dice_<panel>.csv``, ``.png`` into ``out``."""
    cells = []
    for panel in panels:
        first, firsts, second, seconds = PANELS[panel]
        mine = []
        for a, b in itertools.product(firsts, seconds):
            settings = {**BEST, first: a, second: b}
            scores = [run(case, seed=seed, **settings) for seed in range(1, seeds + 1)]
            mine.append(
                Cell(
                    panel,
                    **settings,
                    score=mean(scores),
                    standard_deviation=deviation(scores),
                    seeds=seeds,
                )
            )
        write_rows(out / f"dice_{panel}.csv", Cell, mine)
        draw(out / f"dice_{panel}.png", mine, case.measure)
        cells += mine
    return cells


def run(
    case: Case, *, clip_norm: float, feedback: float, residual: float, step: float, seed: int
) -> float:
    method = DiceSGD(clip_norm, feedback * clip_norm, residual * clip_norm)
    n = len(case.training[0])
    plan = method.plan(
        n=n, batch_size=min(n, BATCH_SIZE), epochs=EPOCHS, epsilon=EPSILON, delta=DELTA
    )
    return train(plan, case, step, seed, case.test)


def draw(path: Path, cells: Sequence[Cell], measure: str) -> None:
    """A coloured grid of one panel."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(4.6, 3.8), layout="constrained")
    named = {
        "clip_norm": "$C_1$",
        "feedback": "$C_2 / C_1$",
        "residual": "$R / C_1$",
        "step": r"$\eta\, C_1$",
    }
    first, firsts, second, seconds = PANELS[cells[0].panel]
    scores = np.array([cell.score for cell in cells]).reshape(len(firsts), len(seconds))
    axis.imshow(scores, aspect="auto", cmap="viridis")
    for i, j in np.ndindex(scores.shape):
        dark = scores[i, j] < (scores.max() + scores.min()) / 2
        axis.text(
            j,
            i,
            f"{scores[i, j]:.3f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    axis.set_xticks(range(len(seconds)), [f"{value:g}" for value in seconds])
    axis.set_yticks(range(len(firsts)), [f"{value:g}" for value in firsts])
    axis.set(xlabel=named[second], ylabel=named[first], title=measure)
    figure.savefig(path, dpi=150)
    plt.close(figure)
