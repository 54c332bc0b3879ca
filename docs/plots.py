"""Draw the pictures of the pages: ``python docs/plots.py`` writes docs/images, from formulas and
from the tables in benchmarks/results; figures that an experiment drew itself are copied from there.
"""

import csv
import math
import shutil
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy.stats import spearmanr

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DRAWN_BY_EXPERIMENTS = ("das_fashion_mnist.png", "dice_bias.png", "fang_fig1.png", "kl_rates.png")


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
    save(figure, path)


def belief(path: Path) -> None:
    """What an attacker who began at 50 % can believe at most."""
    epsilon = np.linspace(0, 8, 200)
    figure, axes = plt.subplots(figsize=(4.6, 3), layout="constrained")
    axes.plot(epsilon, 1 / (1 + np.exp(-epsilon)))
    axes.axhline(0.5, color="grey", linestyle="--")
    axes.set(xlabel="epsilon", ylabel="belief after the release", ylim=(0.45, 1.02), xlim=(0, 8))
    save(figure, path)


def noise_on_the_mean(path: Path) -> None:
    """Standard deviation of the noise on DP-SGD's mean, by batch size."""
    from dpoptim.accounting import calibrate_noise_multiplier

    n, epochs = 60_000, 20
    sizes = 2 ** np.arange(6, 15)
    figure, axes = plt.subplots(figsize=(4.6, 3), layout="constrained")
    for epsilon in (1.0, 2.0, 4.0):
        noise = [
            calibrate_noise_multiplier(
                sample_rate=size / n,
                steps=epochs * n // size,
                epsilon=epsilon,
                delta=1e-5,
                neighboring="add-or-remove-one",
            )
            / size
            for size in sizes.tolist()
        ]
        axes.loglog(sizes, noise, marker="o", label=f"epsilon = {epsilon:g}")
    axes.set(xlabel="batch size", ylabel="noise on the mean, over C")
    axes.legend()
    save(figure, path)


def correlated_errors(path: Path) -> None:
    """Error of correlated noise: over the optimum, and over DP-SGD's when batches are sampled."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    rows = [row for row in table("correlated_errors.csv") if row["steps"] == "256"]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        passes = [int(row["passes"]) for row in mine]
        left.plot(passes, [float(row["over the optimum"]) for row in mine], "o-", label=strategy)
    left.set(xlabel="passes over the data", ylabel="mean error over the optimum", ylim=(0.95, 3))
    left.legend(fontsize="small")
    for epochs in ("10", "40"):
        mine = [row for row in table("amplified_errors.csv") if row["epochs"] == epochs]
        budgets = [float(row["epsilon"]) for row in mine]
        errors = [float(row["over DP-SGD"]) for row in mine]
        right.plot(budgets, errors, "o-", label=f"{epochs} epochs, sampled in turns")
    right.axhline(1, color="grey", linestyle="--", label="DP-SGD")
    right.set(xlabel="epsilon", ylabel="error of prefix sums over DP-SGD's", ylim=(0, 1.05))
    right.legend(fontsize="small")
    save(figure, path)


def one_pass(path: Path) -> None:
    """Accuracy after one pass at each method's best batch size."""
    rows = table("one_pass.csv")
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        budgets = sorted({float(row["epsilon"]) for row in rows})
        best = [
            max(
                float(row["accuracy"])
                for row in rows
                if row["method"] == method and float(row["epsilon"]) == budget
            )
            for budget in budgets
        ]
        axes.plot(budgets, best, "o-", label=method)
    axes.set(xlabel="epsilon", ylabel="accuracy")
    axes.legend(fontsize="small")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Without a date, so that the same figures make the same file."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def plan_ranks(path: Path) -> None:
    """What `dpoptim plan` predicted, against the loss that was measured, for each setting."""
    rows = table("plan_ranks.csv")
    tables = list(dict.fromkeys(row["table"] for row in rows))
    wide = math.ceil(len(tables) / 2)
    figure, panels = plt.subplots(2, wide, figsize=(2.6 * wide, 5.4), layout="tight")
    for axes in panels.flat[len(tables) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, tables, strict=False):
        for epsilon, marker in (("1.0", "o"), ("4.0", "^")):
            here = [row for row in rows if (row["table"], row["epsilon"]) == (name, epsilon)]
            predicted = [float(row["predicted_error"]) for row in here]
            loss = [float(row["log_loss"]) for row in here]
            rank = spearmanr(predicted, loss).statistic
            label = f"epsilon {float(epsilon):g}: {rank:.2f}"
            axes.scatter(predicted, loss, s=16, marker=marker, label=label)
        axes.set(title=name, xlabel="predicted error", xscale="log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(title="rank correlation", fontsize=7, title_fontsize=7)
    for axes in panels[:, 0]:
        axes.set_ylabel("log-loss on the hold-out")
    save(figure, path)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "dpoptim"  # the same files from the same figures
    IMAGES.mkdir(exist_ok=True)
    attacker(IMAGES / "attacker.svg")
    belief(IMAGES / "belief.svg")
    noise_on_the_mean(IMAGES / "noise_on_the_mean.svg")
    correlated_errors(IMAGES / "correlated_errors.svg")
    one_pass(IMAGES / "one_pass.svg")
    for name in DRAWN_BY_EXPERIMENTS:
        shutil.copyfile(RESULTS / name, IMAGES / name)
    plan_ranks(IMAGES / "plan_ranks.svg")
