"""A vision transformer fine-tuned with and without error feedback (cf. Zhang et al. 2024, Table 2).

The paper fine-tunes ViT-small, which has learnt ImageNet, on 50,000 images of CIFAR: 3 epochs,
batches of 1,000, Adam, clip norms 1 and 0.1, (2, 1e-5)-DP: `dice_pretrained` does, for readers who
have those weights and images, which are in no package. Here a transformer of one narrow layer
learns five classes of Fashion-MNIST as public data, without privacy, gets a new head, and is
fine-tuned whole on 4,000 images of the other five, 3 epochs at the paper's rate of sampling.
Zero-out; noise as it is proven, not as published.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.reproduce.dice_cases import Case, blocks
from dpoptim.reproduce.dice_table import OPEN, Row, dice_table
from dpoptim.reproduce.one_pass import load_split
from dpoptim.reproduce.private_runs import Arrays
from dpoptim.runs.train import accuracy

CLIP_NORMS = (1.0, 0.1)
EPSILON = 2.0
TRAINING, CHOOSING = 4_000, 2_000
BATCH, EPOCHS = 100, 3
RATES = (0.03, 0.01, 0.001)
WIDTH, LAYERS, SIDE, CLASSES = 48, 1, 7, 5
METHODS = ("DP-SGD", "fixed batches, clipped", "DiceSGD", OPEN)


class SmallViT(nn.Module):
    """A transformer on the 16 squares of an image of 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = nn.Linear(SIDE * SIDE, WIDTH)
        self.places = nn.Embedding((28 // SIDE) ** 2, WIDTH)
        self.blocks = blocks(WIDTH, LAYERS)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.squares(x) + self.places(torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h).mean(1))
        return out


def in_squares(images: Tensor) -> Tensor:
    """Cut images (n, 784) into (n, 16, 49); values of about one."""
    return F.unfold(5 * images.view(-1, 1, 28, 28), SIDE, stride=SIDE).transpose(1, 2)


def of_classes(part: Arrays, odd: bool) -> Arrays:
    """Take the images of odd classes, or of even ones, numbered from 0; odd ones are the easier."""
    x, y = part
    kept = y % 2 == int(odd)
    return in_squares(x[kept]), y[kept] // 2


def pretrained(part: Arrays) -> SmallViT:
    """Learn public images, without privacy."""
    torch.manual_seed(0)
    model = SmallViT()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    x, y = part
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.head = nn.Linear(WIDTH, CLASSES)
    return model


def vit_case(directory: Path) -> Case:
    """Return the task, at the first of `CLIP_NORMS`."""
    whole, choosing, test = load_split(directory)
    with torch.random.fork_rng(devices=[]):
        model = pretrained(of_classes(whole, odd=True))
    x, y = of_classes(whole, odd=False)
    x_choosing, y_choosing = of_classes(choosing, odd=False)
    return Case(
        "Fashion-MNIST, ViT",
        "accuracy",
        (x[:TRAINING], y[:TRAINING]),
        (x_choosing[:CHOOSING], y_choosing[:CHOOSING]),
        of_classes(test, odd=False),
        lambda: copy.deepcopy(model),
        F.cross_entropy,
        accuracy,
        "Adam",
        batches=(BATCH,),
        epochs=(EPOCHS,),
        clip_norms=CLIP_NORMS[:1],
        steps=RATES,
    )


def dice_vit(
    out: Path,
    case: Case,
    *,
    seeds: int = 3,
    stem: str = "dice_vit",
    paper: Callable[[Row], float] | None = None,
) -> list[Row]:
    """Write ``<stem>.csv`` into the folder ``out``; each clip norm is a case of its own.

    ``paper`` returns what it prints for a row, which then stands beside.
    """
    cases = [
        replace(case, name=f"{case.name}, C = {norm:g}", clip_norms=(norm,)) for norm in CLIP_NORMS
    ]
    return dice_table(
        *(out, cases), seeds=seeds, epsilons=(EPSILON,), names=METHODS, stem=stem, paper=paper
    )
