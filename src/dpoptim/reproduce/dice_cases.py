"""Public data, models and settings on which DiceSGD and DP-SGD are compared."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.losses import per_sample_mean
from dpoptim.reproduce.one_pass import load_split
from dpoptim.reproduce.private_runs import Arrays, Loss
from dpoptim.reproduce.real_cases import load_tweets, tensors_of
from dpoptim.runs.models import build_model
from dpoptim.runs.train import accuracy

WORDS = 48  # of a text; longer ones are cut
KNOWN_WORDS = 1024
PADDING, UNKNOWN = 0, 1  # 2 ends the meaning
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
}


@dataclass(frozen=True)
class Case:
    """A model on public data, and the grid that every method chooses its settings from.

    Attributes:
        choosing: records that settings are chosen on, neither trained nor tested on.
        loss: of outputs and targets, a mean over records.
        score: of a model on records; larger is better.
        steps: learning rates; for SGD times the clip norm (Adam's do not scale with it).
        physical_batch_size: rows at a time.
    """

    name: str
    measure: str
    training: Arrays
    choosing: Arrays
    test: Arrays
    build: Callable[[], nn.Module]
    loss: Loss
    score: Callable[[nn.Module, Tensor, Tensor], float]
    optimizer: str
    batches: Sequence[int]
    epochs: Sequence[int]
    clip_norms: Sequence[float]
    steps: Sequence[float]
    physical_batch_size: int | None = None

    def model_and_optimizer(
        self, step: float, clip_norm: float
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model, always initialised in the same way, and its optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
        rate = step / clip_norm if self.optimizer == "SGD" else step
        return model, OPTIMIZERS[self.optimizer](model.parameters(), lr=rate)


def fashion_softmax(directory: str | Path) -> Case:
    training, choosing, test = load_split(directory)
    return Case(
        "Fashion-MNIST, softmax",
        "accuracy",
        training,
        choosing,
        test,
        lambda: build_model("softmax", (784,), 10),
        F.cross_entropy,
        accuracy,
        "SGD",
        batches=(1000, 4000),
        epochs=(3, 20),
        clip_norms=(0.3, 1.0),
        steps=(32.0, 64.0, 128.0, 256.0),
    )


def tanh_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions of stride 2, each normalised by groups and through tanh, a hidden layer.

    The network of these tables; `dpoptim train` has another, of fewer weights.
    """
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, stride=2, padding=2),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.Flatten(),
    )
    with torch.no_grad():
        features = trunk(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*trunk, nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, outputs))


def fashion_cnn(directory: str | Path) -> Case:
    training, choosing, test = ((x.view(-1, 1, 28, 28) * 10, y) for x, y in load_split(directory))
    return Case(
        "Fashion-MNIST, CNN",
        "accuracy",
        training,
        choosing,
        test,
        lambda: tanh_cnn((1, 28, 28), 10),
        F.cross_entropy,
        accuracy,
        "SGD",
        batches=(2000,),
        epochs=(5,),
        clip_norms=(1.0,),
        steps=(0.5, 1.0, 2.0, 4.0),
        physical_batch_size=500,
    )


def emotion_softmax(directory: str | Path, cache: str | Path) -> Case:
    data = load_tweets(directory, cache=cache)
    x, y, *test = tensors_of(data)
    kept = len(x) - 500
    return Case(
        f"{data.name}, softmax",
        "accuracy",
        (x[:kept], y[:kept]),
        (x[kept:], y[kept:]),
        (test[0], test[1]),
        lambda: build_model("softmax", (x.shape[1],), data.classes),
        F.cross_entropy,
        accuracy,
        "SGD",
        batches=(500, len(x) // 2),
        epochs=(3, 20),
        clip_norms=(0.3, 1.0),
        steps=(2.0, 8.0, 32.0, 128.0),
    )


def restaurant_gpt(
    directory: str | Path, *, known_words: int = KNOWN_WORDS, width: int = 64, layers: int = 2
) -> Case:
    """A small GPT on E2E (Novikova et al. 2017): meanings, then the words for them, as one text.

    Trained on the development set; the test set's halves serve for choosing and testing. All words
    but the ``known_words - 3`` most frequent ones are one unknown word.
    """
    folder = Path(directory)
    texts, tests = (list(read(folder / name)) for name in ("devset.csv", "testset_w_refs.csv"))
    counts = Counter(word for text in texts for word in text)
    places = {word: i + 3 for i, (word, _) in enumerate(counts.most_common(known_words - 3))}
    training, held = numbered(texts, places), numbered(tests, places)
    # the tests are ordered by their meanings, so a text and its paraphrases stay together
    half = len(held[0]) // 2
    return Case(
        "E2E, small GPT",
        "log-likelihood of a word",
        training,
        (held[0][:half], held[1][:half]),
        (held[0][half:], held[1][half:]),
        lambda: SmallGPT(known_words, width, layers),
        word_loss,
        log_likelihood,
        "Adam",
        batches=(512,),
        epochs=(5,),
        clip_norms=(0.3,),
        steps=(0.001, 0.003, 0.01),
        physical_batch_size=128,
    )


def read(path: Path) -> Iterator[list[str]]:
    """The words of each record: its meaning, a mark, its text."""
    for meaning, text in records(path):
        yield [*words(meaning), "\n", *words(text)]


def records(path: Path) -> Iterator[tuple[str, str]]:
    """Each record's meaning and text."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give the folder of the E2E challenge's data.")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["mr"], row["ref"]


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def numbered(texts: Sequence[Sequence[str]], places: dict[str, int]) -> Arrays:
    """Words by number, and the words after them: (records, WORDS - 1), padded with `PADDING`."""
    numbers = torch.full((len(texts), WORDS), PADDING)
    for row, text in zip(numbers, texts, strict=True):
        known = [places.get(word, UNKNOWN) for word in text[:WORDS]]
        row[: len(known)] = torch.tensor(known)
    return numbers[:, :-1], numbers[:, 1:]


def word_losses(outputs: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(
        outputs.transpose(1, 2), following, ignore_index=PADDING, reduction="none"
    )


def text_losses(outputs: Tensor, following: Tensor) -> Tensor:
    return per_sample_mean(word_losses(outputs, following), following != PADDING)


def word_loss(outputs: Tensor, following: Tensor) -> Tensor:
    return text_losses(outputs, following).mean()


@torch.no_grad()
def log_likelihood(model: nn.Module, x: Tensor, y: Tensor, rows: int = 256) -> float:
    """Mean over all words of the logarithm of their predicted probability; ``rows`` at a time."""
    total = sum(
        float(word_losses(model(a), b).double().sum())
        for a, b in zip(x.split(rows), y.split(rows), strict=True)
    )
    return -total / float((y != PADDING).sum())


def blocks(width: int, layers: int) -> nn.ModuleList:
    """Layers of a transformer in pre-norm form, four heads each."""
    layer: dict[str, Any] = {
        "dropout": 0.0,
        "activation": "gelu",
        "batch_first": True,
        "norm_first": True,
    }
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, 4, 4 * width, **layer) for _ in range(layers)
    )


class SmallGPT(nn.Module):
    """A decoder in pre-norm form."""

    def __init__(self, vocabulary: int, width: int, layers: int, longest: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.blocks = blocks(width, layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        h = self.words(x) + self.places(torch.arange(T, device=x.device)[None])
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=x.device)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        out: Tensor = self.head(self.norm(h))
        return out
