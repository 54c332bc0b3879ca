"""What benchmarks/accuracy.py trains: public data in three parts, a model, a loss, a score."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.data import Data, load_digits, load_fashion_mnist
from dpoptim.data.preparation import SquareRoot
from dpoptim.recipes import recipe
from dpoptim.reproduce import dice_cases
from dpoptim.reproduce.dice_cases import tanh_cnn
from dpoptim.reproduce.private_runs import Arrays
from dpoptim.reproduce.real_cases import lines
from dpoptim.runs.models import build_model
from dpoptim.runs.train import accuracy

CHOOSING = 10_000  # of Fashion-MNIST's training images
RANK = 4  # of adapters
TOKENS = 40  # of a tweet; longer ones are cut
SCORED = 300  # texts that the language model is scored on
KNOWN_WORDS = 256  # of E2E
TRAINED_CNN = "cnn of ReLU"


@dataclass(frozen=True)
class Task:
    """A model and records to train it on, to choose its settings on, and to test it on.

    Attributes:
        losses: of outputs and targets, one a row.
        score: of a model on records; larger is better.
        physical_batch_size: rows at a time.
        delta: of the promise.
        tries: runs of each setting by which it is chosen.
        whole: what is trained on once settings are chosen, where that is more than ``training``.
    """

    name: str
    training: Arrays
    choosing: Arrays
    test: Arrays
    build: Callable[[], nn.Module]
    losses: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[nn.Module, Tensor, Tensor], float]
    physical_batch_size: int | None = None
    delta: float = 1e-5
    tries: int = 1
    whole: Arrays | None = None


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def percent(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * accuracy(model, x, y)


def images(name: str, model: str, parts: tuple[Arrays, Arrays, Arrays], classes: int) -> Task:
    """A task on images.

    Args:
        model: of `dpoptim train`, but that ``"cnn"`` is one of tanh, and its is `TRAINED_CNN`.
    """
    shape = tuple(parts[0][0].shape[1:])
    kind = "cnn" if model == TRAINED_CNN else model
    return Task(
        f"{name}, {model}",
        *parts,
        lambda: tanh_cnn(shape, classes) if model == "cnn" else build_model(kind, shape, classes),
        cross_entropy,
        percent,
        physical_batch_size=None if model == "softmax" else 512,
    )


def fashion(
    model: str, directory: Path, *, training: int | None = None, halved: bool = False
) -> Task:
    """Fashion-MNIST, pixels as `dpoptim train` has them.

    Args:
        training: take so many of the 50,000 images that are left to train on.
        halved: in height and width, by means of four pixels.
    """
    data = load_fashion_mnist(directory, (SquareRoot(),))
    assert data.x_test is not None
    assert data.y_test is not None
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    x_test, y_test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    if halved:
        x, x_test = F.avg_pool2d(x, 2), F.avg_pool2d(x_test, 2)
    kept = len(x) - CHOOSING
    first = slice(kept if training is None else training)
    parts = (x[:kept][first], y[:kept][first]), (x[kept:], y[kept:]), (x_test, y_test)
    size = f", {x.shape[2]} x {x.shape[3]}" if halved else ""
    name = "Fashion-MNIST" if training is None else f"Fashion-MNIST, {training:,} images{size}"
    return images(name, model, parts, 10)


def digits(model: str) -> Task:
    """scikit-learn's digits, of which a fifth chooses and a fifth tests."""
    data = load_digits(0, (SquareRoot(),))
    assert data.x_test is not None
    assert data.y_test is not None
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    kept = len(x) - len(data.x_test)
    test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    return images("digits", model, ((x[:kept], y[:kept]), (x[kept:], y[kept:]), test), 10)


def by_recipe(data: Data, model: str, features: str) -> Task:
    """A model of `dpoptim train`, trained on all but the test images once its settings are chosen.

    Args:
        features: ``"scattering"`` or ``"pixels"``.
    """
    assert data.x_test is not None
    assert data.y_test is not None
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    kept = len(x) - len(data.x_test)
    test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    parts = (x[:kept], y[:kept]), (x[kept:], y[kept:]), test
    task = images(data.name, "softmax", parts, data.classes)
    kinds = (features,) if model == "softmax" else (model, features)
    return replace(
        task,
        name=", ".join((data.name, *kinds)),
        build=lambda: build_model(model, tuple(x.shape[1:]), data.classes),
        physical_batch_size=recipe(model, len(x), features).physical_batch_size,
        whole=(x, y),
    )


def emotion(directory: Path, cache: Path) -> Task:
    """Sentence features and a linear classifier."""
    case = dice_cases.emotion_softmax(directory, cache)
    parts = case.training, case.choosing, case.test
    return Task("emotion, sentence features", *parts, case.build, cross_entropy, percent, tries=3)


def few(part: Arrays) -> Arrays:
    """`SCORED` records or a few more, evenly from all."""
    every = len(part[0]) // SCORED
    return part[0][::every], part[1][::every]


def restaurants(directory: Path) -> Task:
    """E2E by a GPT of one narrow layer, from scratch, on few words."""
    case = dice_cases.restaurant_gpt(directory, known_words=KNOWN_WORDS, width=32, layers=1)
    parts = case.training, few(case.choosing), few(case.test)
    return Task("E2E, small GPT", *parts, case.build, dice_cases.text_losses, case.score)


class Adapted(nn.Module):
    """A linear layer that stays, and a trained product of two thin ones beside it (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class LastLayer(nn.Module):
    """The last layer of a sentence encoder with adapters on queries and values, a mean over words,
    and a head.

    Inputs are what the layers before it make of a text, which does not change in training, with a
    last column that is 1 for words and 0 for padding.
    """

    def __init__(self, layer: nn.Module, classes: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        attention = layer.attention.self
        attention.query, attention.value = Adapted(attention.query), Adapted(attention.value)
        self.head = nn.Linear(attention.all_head_size, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        states, words = x[..., :-1], x[..., -1:]
        mask = (1 - words[:, None, None, :, 0]) * -1e4
        states = self.layer(states, attention_mask=mask)
        states = states[0] if isinstance(states, tuple) else states
        mean = (states * words).sum(1) / words.sum(1)
        return self.head(F.normalize(mean, dim=1))


def adapters(directory: Path, cache: Path) -> Task:
    """Emotions by all-MiniLM-L6-v2, its last layer with adapters."""
    import copy

    from transformers import AutoModel, AutoTokenizer

    from dpoptim.data.text_features import encoder_folder

    folder = encoder_folder(None)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = AutoModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, attn_implementation="eager"
    ).eval()
    before, last = encoder.encoder.layer[:-1], encoder.encoder.layer[-1]

    @torch.no_grad()
    def states(texts: list[str]) -> Tensor:
        encoder.encoder.layer = before
        made = []
        for start in range(0, len(texts), 100):
            tokens = tokenizer(
                texts[start : start + 100],
                truncation=True,
                max_length=TOKENS,
                padding="max_length",
                return_tensors="pt",
            )
            words = tokens["attention_mask"][..., None].float()
            made.append(torch.cat([encoder(**tokens).last_hidden_state * words, words], 2))
        return torch.cat(made)

    parts = []
    for part in ("train", "test"):
        file = cache / f"emotion-{part}-{TOKENS}.pt"
        if not file.exists():
            cache.mkdir(parents=True, exist_ok=True)
            torch.save(states(lines(directory / f"{part}_text.txt")), file)
        labels = [int(line) for line in lines(directory / f"{part}_labels.txt")]
        parts.append((torch.load(file), torch.tensor(labels)))
    (x, y), test = parts
    kept = len(x) - 500
    return Task(
        "emotion, LoRA",
        (x[:kept], y[:kept]),
        (x[kept:], y[kept:]),
        test,
        lambda: LastLayer(copy.deepcopy(last), int(y.max()) + 1),
        cross_entropy,
        percent,
        physical_batch_size=128,
    )
