"""A request for an experiment, and its results for the terminal: tables, and names of files."""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dpoptim.terminal import cell, say

# What the folder of each option holds: the command's help, and the end of every error about it.
FOLDERS = {
    "tweets": "a folder of a TweetEval task such as emotion or emoji",
    "e2e": "the folder of the E2E challenge's data: devset.csv and testset_w_refs.csv; with a "
    "model trainset.csv and testset_w_refs.csv",
    "features": "a folder of data sets, each NAME.npz with arrays x_train, y_train, x_test and "
    "y_test, or a folder NAME of such .npy files; the paper's figures stand beside caltech-256, "
    "food-101, cifar-100 and cifar-10",
    "emnist": "the folder of EMNIST's IDX files, gzipped or not: "
    "emnist-balanced-train-images-idx3-ubyte, emnist-balanced-train-labels-idx1-ubyte, and the "
    "same two of test",
    "cifar": "the folder of CIFAR-10's or CIFAR-100's Python pickles (data_batch_1, ..., "
    "test_batch; or train, test), or of pictures of one size sorted as train/CLASS/*.png and "
    "test/CLASS/*.png",
    "model": "a folder that save_pretrained of Hugging Face's transformers wrote: of a ViT for "
    "dice-vit, of GPT-2 and its tokenizer for dice-table3",
}


def fashion_folder() -> Path:
    """Return where Fashion-MNIST usually is."""
    from dpoptim.data import FASHION_MNIST_DIRECTORY

    return Path(FASHION_MNIST_DIRECTORY)


@dataclass(frozen=True)
class Request:
    """Where to write, how much to run, and where data sets are that do not come with a package.

    Attributes:
        out: folder for tables (CSV) and pictures.
        quick: fewer settings and seeds.
        fashion, tweets, e2e: folders of Fashion-MNIST, of a TweetEval task (or, for
            ``das-baselines``, of several), and of the E2E challenge; None: not there.
        features, emnist, cifar, model: folders of the reader's own, see `FOLDERS`; None: not there.
        device: of a model that the reader brings, such as "cuda".
        say: told in a line what is left out, and why.
    """

    out: Path
    quick: bool = False
    fashion: Path = field(default_factory=fashion_folder)
    tweets: Path | None = None
    e2e: Path | None = None
    features: Path | None = None
    emnist: Path | None = None
    cifar: Path | None = None
    model: Path | None = None
    device: str = "cpu"
    say: Callable[[str], None] = print

    @property
    def seeds(self) -> int:
        return 1 if self.quick else 3

    def needed(self, option: str, by: str) -> Path:
        """The folder that an option gives.

        Raises:
            ValueError: it was not given. FileNotFoundError: it is not there.
        """
        folder: Path | None = getattr(self, option)
        if folder is None:
            raise ValueError(f"{by} needs --{option}, {FOLDERS[option]}.")
        if not folder.is_dir():
            raise FileNotFoundError(f"--{option}: {folder} is no folder. Give {FOLDERS[option]}.")
        return folder


MOST_ROWS = 30  # of a table that is shown; its file has all


@contextmanager
def shown(experiment: str, out: Path, console: Console) -> Iterator[None]:
    """Say that an experiment runs, and when it is over what it has written into ``out``.

    Tables grow while it runs: a file says that they are not complete, also where it is killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    before, mark = versions(out), out / f"{experiment}.unfinished"
    mark.write_text(f"Tables that {experiment} has written here are not complete.\n")
    say(f"{experiment} is running; until it ends, {mark} stands beside what it has", to=console)
    with console.status(f"{experiment} is running"):
        yield
    mark.unlink()
    written = sorted(path for path, of in versions(out).items() if before.get(path) != of)
    for path in written:
        if path.suffix == ".csv":
            console.print(table_of(path))
    say(f"saved in {out}/: {', '.join(path.name for path in written)}", to=console)


def versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file was written last, and how long it is."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def table_of(path: Path) -> Table:
    """The first `MOST_ROWS` rows of a CSV file, numbers to four digits."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    more = len(rows) - MOST_ROWS
    table = Table(title=path.name, caption=f"and {more} more rows in the file" if more > 0 else "")
    for name in names:
        table.add_column(cell(name))
    for row in rows[:MOST_ROWS]:
        table.add_row(*(cell(short(value)) for value in row))
    return table


def short(value: str) -> str:
    """A number to four digits; other text, and whole numbers, as they are."""
    try:
        number = float(value)
    except ValueError:
        return value
    return value if value.lstrip("-").isdigit() else f"{number:.4g}"
