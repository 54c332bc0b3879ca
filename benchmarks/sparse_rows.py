"""Selected rows of a large table: what a step costs, and what a model of clicks learns.

``sparse_rows.csv``: milliseconds of a step (forward, backward, noise, update by SGD) of a bag of
20 words from a vocabulary of a million, with 16 columns, 512 records a batch: medians of steps
taken in turn, one thread. Plain PyTorch with a dense and with a sparse gradient, DP-SGD, and
`SparseSGD` at two proportions of false positives; words are drawn by Zipf's law.

``sparse_clicks.csv``: a made-up task. Records hold 10 words of 100,000, drawn by Zipf's law; each
word has a hidden weight, and a click's log-odds are their sum. A bag of 8 columns and a linear
head, both from small values, are trained for 10 epochs by every method at one learning rate, three
seeds (of data, model and noise). What is kept is the AUC on 20,000 fresh records, and the share of
the table's rows that moved.

Run: ``python benchmarks/sparse_rows.py [--seeds 3] [--out benchmarks/results]``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.methods import TrainingMethod
from saving import save_csv

VOCABULARY, COLUMNS, WORDS, BATCH = 1_000_000, 16, 20, 512
METHODS: dict[str, TrainingMethod] = {
    "DP-SGD": dpoptim.DPSGD(1.0),
    "sparse, 1e-3 false positives": dpoptim.SparseSGD(1.0, false_positives=1e-3),
    "sparse, 1e-5 false positives": dpoptim.SparseSGD(1.0, false_positives=1e-5),
}


class Bag(nn.Module):
    """A bag of words and a linear head, from small values."""

    def __init__(self, words: int, columns: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(words, columns, mode="mean", sparse=sparse)
        self.head = nn.Linear(columns, 1)
        nn.init.normal_(self.table.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))[:, 0]


def zipf(words: int, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    """Words by Zipf's law, of exponent 1."""
    share = 1 / np.arange(1, words + 1)
    ends = np.cumsum(share / share.sum())
    drawn = np.searchsorted(ends, generator.random(shape))
    return torch.from_numpy(np.minimum(drawn, words - 1))


# ---- time ---------------------------------------------------------------------------------------


def plain_steps(data: TensorDataset, *, sparse: bool) -> Iterator[None]:
    x, y = data.tensors
    model = Bag(VOCABULARY, COLUMNS, sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
            F.binary_cross_entropy_with_logits(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def private_steps(data: TensorDataset, method: TrainingMethod) -> Iterator[None]:
    model = Bag(VOCABULARY, COLUMNS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = method.plan(n=len(data), batch_size=BATCH, steps=1000, noise_multiplier=1.0, delta=1e-6)
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for a, b in private.batches():
            private.backward(F.binary_cross_entropy_with_logits(model(a), b, reduction="none"))
            optimizer.step()
            yield


def times(rounds: int, skipped: int = 3) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    x = zipf(VOCABULARY, (40 * BATCH, WORDS), generator)
    data = TensorDataset(x, torch.from_numpy(generator.integers(0, 2, len(x))).float())
    variants = {
        "plain": plain_steps(data, sparse=False),
        "plain, sparse gradient": plain_steps(data, sparse=True),
        **{name: private_steps(data, method) for name, method in METHODS.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(skipped + rounds):
        for name, steps in variants.items():
            start = time.perf_counter()
            next(steps)
            if number >= skipped:
                taken[name].append(1000 * (time.perf_counter() - start))
    return [
        {"variant": name, "ms": f"{statistics.median(each):.3g}", "rounds": rounds}
        for name, each in taken.items()
    ]


# ---- clicks -------------------------------------------------------------------------------------

CLICK_WORDS, RECORDS, FRESH, CLICK_BATCH, EPOCHS, DELTA = 100_000, 50_000, 20_000, 2000, 10, 1e-6
RATE = 4.0  # the best of 1, 4 and 16, for DP-SGD and for SparseSGD
SHARES, PROPORTIONS = (0.1, 0.5), (1e-1, 1e-3)


@dataclass(frozen=True)
class Trial:
    """A method at some settings; epsilon 0: no privacy."""

    method: str
    epsilon: float
    share: float = 0.0
    false_positives: float = 0.0

    def plan(self) -> dpoptim.Plan:
        method: TrainingMethod = (
            dpoptim.DPSGD(1.0)
            if self.method == "DP-SGD"
            else dpoptim.SparseSGD(1.0, share=self.share, false_positives=self.false_positives)
        )
        return method.plan(
            n=RECORDS,
            batch_size=CLICK_BATCH,
            epochs=EPOCHS,
            delta=DELTA,
            epsilon=self.epsilon,
        )


def clicks(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Records to train on, and fresh ones."""
    generator = np.random.default_rng(seed)
    weights = torch.from_numpy(generator.normal(size=CLICK_WORDS)).float()
    x = zipf(CLICK_WORDS, (RECORDS + FRESH, 10), generator)
    odds = weights[x].sum(1)
    y = (torch.from_numpy(generator.random(len(x))) < torch.sigmoid(odds)).float()
    return TensorDataset(x[:RECORDS], y[:RECORDS]), TensorDataset(x[RECORDS:], y[RECORDS:])


def auc(model: nn.Module, data: TensorDataset) -> float:
    with torch.no_grad():
        return float(roc_auc_score(data.tensors[1], model(data.tensors[0])))


def plainly(model: nn.Module, data: TensorDataset, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(RECORDS, generator=generator).split(CLICK_BATCH):
            x, y = (part[rows] for part in data.tensors)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()


def privately(model: nn.Module, data: TensorDataset, seed: int, plan: dpoptim.Plan) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=seed) as private:
        for x, y in private.batches():
            private.backward(F.binary_cross_entropy_with_logits(model(x), y, reduction="none"))
            optimizer.step()


def learned(trial: Trial, seed: int) -> dict[str, Any]:
    """One run: a row of the table."""
    data, fresh = clicks(seed)
    torch.manual_seed(seed)
    model = Bag(CLICK_WORDS, 8)
    start = model.table.weight.detach().clone()
    train: Callable[..., None] = plainly
    settings: tuple[Any, ...] = ()
    if trial.epsilon:
        train, settings = privately, (trial.plan(),)
    train(model, data, seed, *settings)
    moved = (model.table.weight.detach() != start).any(1).double().mean()
    return {
        "method": trial.method,
        "epsilon": trial.epsilon or "",
        "share": trial.share or "",
        "false_positives": trial.false_positives or "",
        "seed": seed,
        "auc": f"{auc(model, fresh):.4f}",
        "rows_moved": f"{float(moved):.3g}",
    }


def trials() -> list[Trial]:
    epsilons = (1.0, 4.0)
    return [
        Trial("plain", 0.0),
        *(Trial("DP-SGD", epsilon) for epsilon in epsilons),
        *(
            Trial("SparseSGD", epsilon, share, proportion)
            for epsilon in epsilons
            for share in SHARES
            for proportion in PROPORTIONS
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    save_csv(times(given.rounds), given.out / "sparse_rows.csv")
    rows = [learned(trial, seed) for trial in trials() for seed in range(given.seeds)]
    save_csv(rows, given.out / "sparse_clicks.csv")


if __name__ == "__main__":
    main()
