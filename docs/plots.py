"""Draw the pictures of the concept pages: ``python docs/plots.py`` writes docs/images/*.svg."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).parent / "images"


def true_positive_bound(false_positive: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """Most that an attacker on an (epsilon, delta)-private run can be right, at this rate of false
    alarms.
    """
    wide = np.minimum(1, np.exp(epsilon) * false_positive + delta)
    narrow = 1 - np.exp(-epsilon) * np.maximum(0, 1 - delta - false_positive)
    return np.minimum(wide, narrow)


def attacker(path: Path) -> None:
    """The best attack on one record's membership, for several epsilons."""
    false_positive = np.linspace(0, 1, 501)
    figure, axes = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        axes.plot(
            false_positive,
            true_positive_bound(false_positive, epsilon, 1e-5),
            label=f"epsilon = {epsilon:g}",
        )
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="guessing")
    axes.set(
        xlabel="false alarms", ylabel="records found", xlim=(0, 1), ylim=(0, 1), aspect="equal"
    )
    axes.legend(loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def belief(path: Path) -> None:
    """What an attacker who began at 50 % can believe at most."""
    epsilon = np.linspace(0, 8, 200)
    figure, axes = plt.subplots(figsize=(4.6, 3), layout="constrained")
    axes.plot(epsilon, 1 / (1 + np.exp(-epsilon)))
    axes.axhline(0.5, color="grey", linestyle="--")
    axes.set(xlabel="epsilon", ylabel="belief after the release", ylim=(0.45, 1.02), xlim=(0, 8))
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "dpoptim"  # the same files from the same figures
    IMAGES.mkdir(exist_ok=True)
    attacker(IMAGES / "attacker.svg")
    belief(IMAGES / "belief.svg")
